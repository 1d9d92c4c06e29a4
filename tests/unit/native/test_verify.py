"""A plan as llama.cpp's settings, and a ledger compared with a projection, without running anything."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.plans import placed, settings
from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import UsageError
from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.native.llama.dry_run import ContextProjection
from tokenmill.native.verify import Comparison, compare, overrides, request, verify, verify_by_binary
from tokenmill.units import GIB, MIB


def profile(name: str) -> Profile:
    return describe((catalog.header(name),), format="catalog")


KIMI = profile("kimi-k2.5:Q4_K_S")


@pytest.mark.parametrize(
    ("item", "predicted", "projected", "agrees"),
    [
        ("weights", 1001 * MIB, 1000 * MIB, True),
        ("weights", 1002 * MIB, 1000 * MIB, False),
        ("kv", 0, 1, False),
        ("compute", 163 * MIB, 100 * MIB, True),  # 64 MiB
        ("compute", 9100 * MIB, 10000 * MIB, True),  # 10 %
        ("compute", 8900 * MIB, 10000 * MIB, False),
    ],
)
def test_how_close_is_close_enough(item: str, predicted: int, projected: int, agrees: bool) -> None:
    assert Comparison("host", item, predicted, projected).agrees is agrees  # type: ignore[arg-type]


def test_difference_is_relative_to_the_real_value() -> None:
    assert Comparison("host", "kv", 110, 100).difference == pytest.approx(0.1)
    assert Comparison("host", "kv", 110, 0).difference is None


def test_a_plan_without_gpus_needs_no_placement() -> None:
    run = request(placed(KIMI, settings(16384, 2)), outputs=2)
    assert (run.gpus, run.gpu_layers, run.tensor_split, run.overrides) == ((), 0, (), ())
    assert (run.contexts[0].tokens, run.contexts[0].sequences, run.contexts[0].outputs) == (16384, 2, 2)


def test_a_plan_with_gpus_in_llama_cpps_words() -> None:
    plan = placed(KIMI, settings(), cards=2, first=3, resident=range(3, 8))
    run = request(plan)
    assert run.gpus == (0, 1)
    assert run.tensor_split == (29.0, 30.0)  # the output counts as a layer of the last card
    assert run.gpu_layers == 59
    assert {device for _, device in run.overrides} == {"CPU"}
    for tensor, home in zip(KIMI.tensors, plan.placement.homes, strict=True):
        moved = [device for pattern, device in run.overrides if re.search(pattern, tensor.name)]
        away = plan.placement.device_of(tensor) != home and tensor.cls is not TensorClass.EMBEDDING
        assert moved == (["CPU"] if away else []), tensor.name


def test_layers_that_only_predict_are_counted_where_llama_cpp_counts_them() -> None:
    glm = profile("glm-4.5:Q4_K_M")
    run = request(placed(glm, settings(), cards=1, resident=range(93)))
    assert (run.gpu_layers, run.tensor_split, run.overrides) == (
        94,
        (94.0,),
        (),
    )  # 92, the prediction layer, the output


def test_tensors_outside_the_layers_are_moved_by_name() -> None:
    plan = placed(KIMI, settings(), cards=1, resident=range(61))
    homes = tuple(
        "dram" if tensor.name == "output.weight" else home
        for tensor, home in zip(KIMI.tensors, plan.placement.homes, strict=True)
    )
    assert overrides(KIMI, replace(plan.placement, homes=homes)) == ((r"^output\.weight$", "CPU"),)


def test_rows_of_every_memory() -> None:
    plan = placed(KIMI, settings(), cards=1, resident=range(2))
    found = ContextProjection(
        (Buffer("CPU", 500 * GIB), Buffer("CUDA_Host", 0, 0, 64 * MIB), Buffer("CUDA0", 10 * GIB, 549 * MIB, 3 * GIB)),
        output_bytes=1 * MIB,
        source="breakdown",
    )
    rows = {(row.tier, row.item): row for row in compare(plan, found)}
    assert set(rows) == {(tier, item) for tier in ("host", "gpu0") for item in ("weights", "kv", "compute")} - {
        ("host", "kv")
    }
    assert rows["host", "compute"].projected_bytes == 64 * MIB  # logits are the process's own, not a compute buffer
    assert rows["host", "compute"].agrees
    assert rows["gpu0", "kv"].predicted_bytes == 8192 * 61 * 576 * 2 == rows["gpu0", "kv"].projected_bytes
    ledger = plan.ledger
    assert rows["gpu0", "compute"].predicted_bytes == ledger.of("gpu0", "compute") + ledger.of("gpu0", "staging")
    assert rows["host", "weights"].predicted_bytes == ledger.of("dram", "weights")


def test_sums_over_all_memories() -> None:
    plan = placed(KIMI, settings(), cards=2, resident=range(2))
    found = ContextProjection((Buffer("CPU", KIMI.bytes, 8192 * 61 * 576 * 2, 9),), 0, "breakdown")
    rows = compare(plan, found, summed=True)
    assert [(row.tier, row.item, row.agrees) for row in rows] == [("all", "weights", True), ("all", "kv", True)]


def test_plans_for_other_engines_are_refused() -> None:
    plan = placed(KIMI, replace(settings(), engine="ik_llama"))
    with pytest.raises(UsageError, match="ik_llama"):
        verify(plan, Path("kimi.gguf"))


def test_the_program_next_to_the_server_is_run(tmp_path: Path) -> None:
    """llama-fit-params gets the plan's memory flags and none of the server's; its lines are compared device by device."""
    program = tmp_path / "llama-fit-params"
    program.write_text('#!/bin/sh\necho "$@" > "$0.argv"\nprintf "Host 10 2 64 \\n"\n')
    program.chmod(0o755)
    argv = (
        "llama-server",
        "--model",
        "m.gguf",
        "--alias",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        "1",
        "--ctx-size",
        "512",
        "--jinja",
    )
    found = verify_by_binary(placed(KIMI, settings(16384, 1)), argv, str(tmp_path / "llama-server"))
    assert (tmp_path / "llama-fit-params.argv").read_text().split() == [
        "--model",
        "m.gguf",
        "--ctx-size",
        "512",
        "--fit-print",
        "on",
    ]
    assert {(row.tier, row.item, row.projected_bytes) for row in found.rows} >= {
        ("host", "weights", 10 * MIB),
        ("host", "kv", 2 * MIB),
        ("host", "compute", 64 * MIB),
    }
