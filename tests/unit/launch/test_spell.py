"""Command lines of plans: only flags of the engine version are used; anything else is an error."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.errors import FlagUnknown, UsageError
from tokenmill.launch import Command, FlagSet, read_command, spell, to_placement
from tokenmill.launch.flag_sets import captured, stored
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.plan import LedgerRow, Placement, Plan
from tokenmill.units import GIB, MIB


def pairs(command: Command) -> dict[str, str | None]:
    """Flags and their values."""
    found: dict[str, str | None] = {}
    for word, following in zip(command.argv, (*command.argv[1:], "--"), strict=True):
        if word.startswith("-"):
            found[word] = None if following.startswith("--") or following[:2] in ("-m", "-a") else following
    return found


def hybrid(
    engine: DialectName = "llama.cpp", *, gpus: int = 2, resident: tuple[int, ...] = (1, 6), **changes: Any
) -> Plan:
    profile = small_profile(10, latent=True)
    placement = placed(profile, ["gpu0"] * 5 + ["gpu1"] * 5, "gpu1", resident)
    goal = changes.pop("goal", Goal(engine=engine))
    return plan_of(profile, placement, machine_with(gpus), goal=goal, **changes)


def on_cpu(engine: DialectName = "llama.cpp", *, gpus: int = 0, **changes: Any) -> Plan:
    profile = small_profile(4)
    goal = changes.pop("goal", Goal(engine=engine, cpu_only=True))
    return plan_of(profile, placed(profile, ["dram"] * 4, "dram"), machine_with(gpus), goal=goal, **changes)


def test_a_hybrid_plan_for_todays_llama_cpp() -> None:
    command = spell(hybrid(sequences=3), model="/m/x.gguf", port=9000)
    assert command.argv[0] == "llama-server"
    assert pairs(command) == {
        "--model": "/m/x.gguf",
        "--alias": "Small Mixture",
        "--host": "127.0.0.1",
        "--port": "9000",
        "--ctx-size": "24576",
        "--parallel": "3",
        "--batch-size": "2048",
        "--ubatch-size": "512",
        "--threads": "8",
        "--threads-batch": "8",
        "--cache-type-k": "f16",
        "--cache-type-v": "f16",
        "--flash-attn": "on",
        "--cache-ram": "0",
        "--load-mode": "mmap",
        "--no-repack": None,
        "--fit": "off",
        "--n-gpu-layers": "999",
        "--tensor-split": "5,6",
        "--override-tensor": r"blk\.1\.ffn_.*_exps\.=CUDA0,blk\.6\.ffn_.*_exps\.=CUDA1,exps=CPU",
        "--jinja": None,
        "--metrics": None,
    }
    assert command.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert any("8192 tokens each" in note for note in command.notes)


def test_a_hybrid_plan_for_the_fork() -> None:
    command = spell(hybrid("ik_llama"), model="/m/x.gguf")
    flags = pairs(command)
    assert flags["-mla"] == "3"
    assert flags["-amb"] == "256"  # what the ledger counts with
    assert "--fit" not in flags
    assert "--no-repack" not in flags
    assert not {"-muge", "--merge-qkv", "-fmoe"} & set(flags)
    assert any("swap" in note for note in command.notes)


def test_the_fork_is_told_what_the_ledger_counted_with() -> None:
    options = IkOptions(mla=1, amb_mib=512, fmoe=False, muge=True, rtr=True)
    flags = pairs(spell(hybrid("ik_llama", ik=options), model="m"))
    assert (flags["-mla"], flags["-amb"]) == ("1", "512")
    assert {"-no-fmoe", "-muge", "--run-time-repack"} <= set(flags)


def test_older_versions_of_the_fork() -> None:
    flags = pairs(spell(hybrid("ik_llama-2025"), model="m"))
    assert "-fmoe" in flags
    assert "-amb" not in flags
    goal = Goal(engine="ik_llama-2025", own_fit=True)
    with pytest.raises(FlagUnknown, match="ik_llama.cpp of 2025 has no flag --fit"):
        spell(hybrid("ik_llama-2025", goal=goal), model="m")
    goal = Goal(engine="ik_llama-2026-04", own_fit=True, fit_margin_bytes=(GIB, 2 * GIB))
    with pytest.raises(FlagUnknown, match="--gpu-fit-margin"):
        spell(hybrid("ik_llama-2026-04", goal=goal), model="m")


@pytest.mark.parametrize(
    ("mmap", "mlock", "today", "before"),
    [
        (True, False, ["--load-mode", "mmap"], []),
        (False, False, ["--load-mode", "none"], ["--no-mmap"]),
        (True, True, ["--load-mode", "mmap+mlock"], ["--mlock"]),
        (False, True, ["--load-mode", "mlock"], ["--no-mmap", "--mlock"]),
    ],
)
def test_how_weights_are_loaded(mmap: bool, mlock: bool, today: list[str], before: list[str]) -> None:
    engines: tuple[tuple[DialectName, list[str]], ...] = (
        ("llama.cpp", today),
        ("llama.cpp-2025", before),
        ("ik_llama", before),
    )
    for engine, words in engines:
        argv = spell(on_cpu(engine, mmap=mmap, mlock=mlock), model="m").argv
        named = {"--load-mode", "--no-mmap", "--mlock"}
        found = [word for at, word in enumerate(argv) if word in named or argv[at - 1] == "--load-mode"]
        assert found == words, engine


def test_repacking_is_asked_for_where_it_is_off_and_refused_where_it_is_on() -> None:
    assert "--no-repack" not in spell(on_cpu(repack=True), model="m").argv
    assert "--run-time-repack" in spell(on_cpu("ik_llama", repack=True), model="m").argv


def test_cpu_only_takes_no_gpu_memory() -> None:
    assert pairs(spell(on_cpu(gpus=1), model="m"))["--device"] == "none"
    assert "--device" not in spell(on_cpu(), model="m").argv
    assert pairs(spell(on_cpu(), model="m"))["--n-gpu-layers"] == "0"


def test_fit_or_a_placement_never_both() -> None:
    goal = Goal(own_fit=True, fit_margin_bytes=(2 * GIB, 3 * GIB))
    flags = pairs(spell(hybrid(goal=goal), model="m"))
    assert flags["--fit"] == "on"
    assert flags["--fit-target"] == "2048,3072"
    assert not {"--n-gpu-layers", "--tensor-split", "--override-tensor", "--n-cpu-moe", "--cpu-moe"} & set(flags)


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ((), {}),
        ((3072,), {"--fit-margin": "3072"}),
        ((12000,) * 7 + (12550,), {"--fit-margin": "12000", "--gpu-fit-margin": "7,12550"}),
    ],
)
def test_fit_of_the_fork(margins: tuple[int, ...], expected: dict[str, str]) -> None:
    goal = Goal(engine="ik_llama", own_fit=True, fit_margin_bytes=tuple(margin * MIB for margin in margins))
    flags = pairs(spell(hybrid("ik_llama", goal=goal), model="m"))
    assert "--fit" in flags
    assert {name: value for name, value in flags.items() if "margin" in name} == expected
    assert not {"--tensor-split", "--override-tensor", "--cpu-moe"} & set(flags)


@pytest.mark.parametrize(
    ("sequences", "resident", "floor"),
    [
        (31, (), None),
        (32, (), "128"),
        (64, (), "128"),
        (127, (), "128"),
        (128, (), "256"),
        (32, tuple(range(10)), None),
    ],
)
def test_the_cliff_at_32_rows(sequences: int, resident: tuple[int, ...], floor: str | None) -> None:
    command = spell(hybrid(sequences=sequences, resident=resident), model="m")
    assert command.env.get("GGML_OP_OFFLOAD_MIN_BATCH") == floor
    assert "GGML_OP_OFFLOAD_MIN_BATCH" not in spell(hybrid("ik_llama", sequences=sequences), model="m").env


def test_only_the_plans_gpus_are_shown_and_in_its_order() -> None:
    profile = small_profile(6)
    placement = placed(profile, ["gpu3"] * 3 + ["gpu1"] * 3, "gpu1", {1})
    command = spell(plan_of(profile, placement, machine_with(4)), model="m")
    assert command.env["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert pairs(command)["--override-tensor"] == r"blk\.1\.ffn_.*_exps\.=CUDA0,exps=CPU"


def test_cards_of_another_maker_have_other_names() -> None:
    plan = hybrid()
    cards = tuple(replace(gpu, vendor="amd") for gpu in machine_with(3).gpus)
    command = spell(replace(plan, machine=replace(plan.machine, gpus=cards)), model="m")
    assert "=ROCm1," in (pairs(command)["--override-tensor"] or "")
    assert command.env == {"HIP_VISIBLE_DEVICES": "0,1"}


def test_memory_is_spread_where_there_are_nodes() -> None:
    plan = replace(on_cpu(host_gib=400), machine=machine_with(nodes=2))
    assert pairs(spell(plan, model="m"))["--numa"] == "numactl"
    assert "--numa" not in spell(on_cpu(), model="m").argv


def test_a_cache_type_that_the_engine_lacks() -> None:
    with pytest.raises(UsageError, match="no cache type q6_0") as caught:
        spell(hybrid(cache_type_k="q6_0"), model="m")
    assert "ik_llama.cpp" in (caught.value.hint or "")
    assert "q6_0" in spell(hybrid("ik_llama", cache_type_k="q6_0"), model="m").argv


def test_a_flag_that_the_version_lacks_is_an_error() -> None:
    flags = stored("llama.cpp")
    without = FlagSet("llama.cpp b9", type(flags.values)({k: v for k, v in flags.values.items() if k != "--cache-ram"}))
    with pytest.raises(FlagUnknown, match="llama.cpp b9 has no flag --cache-ram"):
        spell(hybrid(), model="m", flags=without)
    with pytest.raises(FlagUnknown, match="--moe-cache-mib"):
        spell(hybrid(goal=Goal(engine="llama.cpp-2025"), moe_cache_bytes=GIB), model="m")


def test_a_plan_for_another_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="the plan is for ik_llama"):
        spell(hybrid("ik_llama"), model="m", flags=captured("llama.cpp-b11549"))
    assert spell(hybrid(), model="m", flags=captured("llama.cpp-b8156"))  # a version of the same engine


def test_vllm() -> None:
    profile = small_profile(4)
    placement = Placement(("gpu0",) * len(profile.tensors), ("gpu0",) * 4, "gpu0")
    goal = Goal(engine="vllm", gpu_memory_utilization=0.88)
    plan = plan_of(
        profile,
        placement,
        machine_with(2),
        goal=goal,
        engine="vllm",
        gpu_memory_utilization=0.88,
        tensor_parallel=1,
        cache_type_k="fp8",
        cache_type_v="fp8",
        sequences=4,
    )
    command = spell(plan, model="org/model", port=8000)
    assert command.argv[:3] == ("vllm", "serve", "org/model")
    flags = pairs(command)
    assert flags["--max-model-len"] == "8192"
    assert flags["--max-num-seqs"] == "4"
    assert flags["--gpu-memory-utilization"] == "0.88"
    assert flags["--tensor-parallel-size"] == "1"
    assert flags["--kv-cache-dtype"] == "fp8"
    assert "--enable-prefix-caching" in flags
    assert command.env["CUDA_VISIBLE_DEVICES"] == "0"
    module = spell(plan, model="org/model", binary="python -m vllm.entrypoints.openai.api_server").argv
    assert module[:5] == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")
    with pytest.raises(UsageError, match="cache types K"):
        spell(replace(plan, settings=replace(plan.settings, cache_type_k="q8_0")), model="m")


def test_vllm_on_the_processors_pages_by_32_and_takes_what_the_ledger_counts() -> None:
    plan = on_cpu("vllm")
    plan = replace(plan, ledger=replace(plan.ledger, full_context=(LedgerRow("dram", "kv", 3 * MIB),)))
    command = spell(plan, model="m")
    flags = pairs(command)
    assert flags["--block-size"] == "32"
    assert flags["--kv-cache-memory-bytes"] == str(3 * MIB)
    assert {"--enforce-eager", "--enable-prompt-tokens-details"} <= set(flags)
    assert "--gpu-memory-utilization" not in flags
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "auto"


@pytest.mark.parametrize(("model", "offline"), [("/m/moe", True), ("./moe", True), ("~/moe", True), ("org/moe", False)])
def test_vllm_asks_nobody_about_a_folder_that_is_here(model: str, offline: bool) -> None:
    env = spell(on_cpu("vllm"), model=model).env
    assert ("HF_HUB_OFFLINE" in env) is offline
    assert env["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_with_weights_on_the_host_says_how_many() -> None:
    profile = small_profile(4)
    homes = tuple("dram" if "exps" in row.name else "gpu0" for row in profile.tensors)
    plan = plan_of(profile, Placement(homes, ("gpu0",) * 4, "gpu0"), machine_with(1), goal=Goal(engine="vllm"))
    assert pairs(spell(plan, model="m"))["--cpu-offload-gb"] == "1"


@given(
    st.sampled_from(["llama.cpp", "llama.cpp-2025", "ik_llama"]),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sets(st.integers(0, 39)),
    st.integers(1, 5),
    st.booleans(),
)
def test_what_is_spelled_reads_back(
    engine: DialectName, count: int, host: int, cut: int, resident: set[int], sequences: int, mmap: bool
) -> None:
    profile = small_profile(count, dense=0)
    layers = ["dram" if i < host else "gpu0" if i < cut else "gpu1" for i in range(count)]
    placement = placed(profile, layers, layers[-1], resident)
    plan = plan_of(profile, placement, machine_with(2), goal=Goal(engine=engine), sequences=sequences, mmap=mmap)
    command = spell(plan, model="/m/x.gguf", binary="/opt/ik_llama/llama-server" if engine == "ik_llama" else None)
    env = " ".join(f"{name}={value}" for name, value in command.env.items())
    text = env + " " + " ".join(f"'{word}'" for word in command.argv)
    read = read_command(text)
    assert read.unknown == ()
    assert (read.goal.context, read.goal.sequences, read.goal.mmap) == (8192, sequences, mmap)
    assert (read.goal.cpu_only, read.goal.repack, read.goal.cache_ram_bytes) == (not placement.gpus, False, 0)
    again = to_placement(read, profile, len(read.goal.gpus) if read.goal.gpus is not None else 2)
    assert again == placement
