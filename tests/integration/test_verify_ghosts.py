"""Predicted weights, caches and buffers equal those that llama.cpp projects in dry runs of ghosts."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from support import llama
from support.dry_runs import projected
from support.plans import placed, settings
from tokenmill.engine import fit_params
from tokenmill.errors import EngineError
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate, ghost
from tokenmill.model.synthetic.generate import SyntheticKind
from tokenmill.native.llama.dry_run import ContextProjection, DryRun, project
from tokenmill.native.verify import verify
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.llama_cpp import build_graph
from tokenmill.planner.memory.kv_cells import KvContext, kv_bytes, largest_batch, output_bytes
from tokenmill.planner.memory.weights import is_repacked
from tokenmill.units import KIB, MIB

GHOSTS = [
    "kimi-k2.5:Q4_K_S",
    "deepseek-v3:Q4_K_M",
    "llama-4-maverick:Q4_K_M",
    "llama-4-scout:nvfp4",
    "qwen3-235b-a22b:Q4_K_M",
    "gpt-oss-120b:MXFP4",
    "glm-4.5:Q4_K_M",
    "llama-3.3-70b:Q4_K_M",
    "qwen3-32b:Q8_0",
]
# gated delta net (twice), Mamba 2, index of sparse attention (in all layers; in some), heads with norms as wide as all of them
HYBRIDS = [
    "qwen3.5-35b-a3b:Q4_K_M",
    "qwen3.5-397b-a17b:Q4_K_M",
    "qwen3-next-80b-a3b:Q4_K_M",
    "nemotron-3-nano-30b-a3b:Q4_K_M",
    "nemotron-3-super-120b-a12b:Q4_K_M",
    "deepseek-v3.2:Q4_K_M",
    "glm-5.2:Q4_K_M",
    "minimax-m2.5:Q4_K_M",
]
REWRITTEN = ("kimi-k2.5", "qwen3-32b")  # stacks of experts and latent projections; plain matrices
QUANTS = ("Q4_0", "Q4_K_S", "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_S", "Q2_K", "IQ4_NL", "MXFP4_MOE", "BF16")
MATRIX = tuple(
    KvContext(tokens, ubatch=ubatch, type_k=cache, type_v=cache)
    for tokens, ubatch, cache in product((8192, 32768, 131072), (512, 2048), ("f16", "q8_0", "q4_0"))
)
# rounding and padding, unified and separate caches, few logits, full windows, no flash attention
CORNERS = (
    KvContext(300),
    KvContext(5001, 3),
    KvContext(2048, 4, unified=False),
    KvContext(1000, 3, unified=False, type_k="q5_1", type_v="q5_1"),
    KvContext(4096, 8, outputs=8),
    KvContext(4096, batch=256),
    KvContext(20000, full_windows=True),
    KvContext(8192, flash_attention=False, ubatch=256),
    KvContext(32768, 2, flash_attention=False),
)
# with few logits, the layers and not the output decide the size of the buffer
FEW_LOGITS = (
    KvContext(8192, outputs=1),
    KvContext(8192),
    KvContext(32768, ubatch=2048, outputs=1),
    KvContext(131072, type_k="q8_0", type_v="q8_0", outputs=1),
    KvContext(8192, 4, outputs=4),
    KvContext(4096, 16, unified=False, outputs=16),
    KvContext(8192, flash_attention=False, ubatch=256, outputs=1),
)


def check(profile: Profile, context: KvContext, found: ContextProjection, *, compute_share: float) -> None:
    assert found.source == "breakdown"
    loaded = profile.bytes - sum(tensor.bytes for tensor in profile.of(TensorClass.MTP))
    assert sum(buffer.model_bytes for buffer in found.buffers) == pytest.approx(loaded, rel=1e-6)
    assert sum(buffer.context_bytes for buffer in found.buffers) == sum(kv_bytes(profile, context))
    computed = sum(buffer.compute_bytes for buffer in found.buffers)
    predicted = buffer_bytes(build_graph(profile, largest_batch(profile, context)).steps)
    assert predicted == pytest.approx(computed, rel=compute_share, abs=128 * KIB), context
    assert output_bytes(profile, context) == pytest.approx(found.output_bytes, abs=0.01 * MIB)


def check_repacked(profile: Profile, found: ContextProjection) -> None:
    repacked = sum(buffer.model_bytes for buffer in found.buffers if buffer.name == "CPU_REPACK")
    assert repacked == sum(tensor.bytes for tensor in profile.tensors if is_repacked(tensor))


Dry = dict[str, tuple[Profile, tuple[ContextProjection, ...]]]
"""Profile and projections for every context, by name of the ghost."""


def run_dry(names: Sequence[str], contexts: tuple[KvContext, ...], folder: Path) -> Dry:
    written = [ghost.write(name, folder / f"{number}.gguf") for number, name in enumerate(names)]
    found = projected([(Path(one.path), DryRun(contexts)) for one in written])
    for one in written:
        assert Path(one.path).stat().st_blocks * 512 == one.disk_bytes  # nothing touched the hole
    return {name: (read(one.path), seen) for name, one, seen in zip(names, written, found, strict=True)}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    return run_dry(GHOSTS, MATRIX + CORNERS, tmp_path_factory.mktemp("ghosts"))


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    names = [f"{model}:{quant}" for model, quant in product(REWRITTEN, QUANTS)]
    return run_dry(names, (KvContext(512),), tmp_path_factory.mktemp("rewritten"))


@pytest.mark.parametrize("name", GHOSTS)
def test_projected_as_predicted(dry: Dry, name: str) -> None:
    profile, contexts = dry[name]
    for context, found in zip(MATRIX + CORNERS, contexts, strict=True):
        check(profile, context, found, compute_share=0.001)
    check_repacked(profile, contexts[0])


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    return run_dry(HYBRIDS, FEW_LOGITS, tmp_path_factory.mktemp("hybrids"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_and_sparse_layers_projected_as_predicted(hybrids: Dry, name: str) -> None:
    profile, contexts = hybrids[name]
    for context, found in zip(FEW_LOGITS, contexts, strict=True):
        check(profile, context, found, compute_share=0.01)
    check_repacked(profile, contexts[0])


def test_kimi_delta_attention_projected_as_predicted(tmp_path: Path) -> None:
    name = "ling-3-flash:Q4_K_M"
    contexts = tuple(context for context in FEW_LOGITS if context.type_k == "f16")  # the only type that its heads allow
    profile, found = run_dry([name], contexts, tmp_path)[name]
    for context, projection in zip(contexts, found, strict=True):
        # llama.cpp reads the states of the next layer early, which is not drawn
        check(profile, context, projection, compute_share=0.02)


@pytest.mark.parametrize("name", ["deepseek-v4-flash:MXFP4", "kimi-k3:MXFP4", "minimax-m3:Q4_K_M"])
def test_caches_of_layers_that_are_only_approximated(name: str, tmp_path: Path) -> None:
    contexts = (
        KvContext(8192),
        KvContext(20000, 3),
        KvContext(8192, 4, unified=False),
        KvContext(4096, full_windows=True),
    )
    profile, found = run_dry([name], contexts, tmp_path)[name]
    for context, projection in zip(contexts, found, strict=True):
        assert sum(buffer.context_bytes for buffer in projection.buffers) == sum(kv_bytes(profile, context)), context


@pytest.mark.parametrize("quant", QUANTS)
def test_rewritten_types(rewritten: Dry, quant: str) -> None:
    for model in REWRITTEN:
        profile, contexts = rewritten[f"{model}:{quant}"]
        check_repacked(profile, contexts[0])


def test_no_weights_are_repacked_without_repack(tmp_path: Path) -> None:
    ghost.write("qwen3-32b:Q4_K_M", tmp_path / "ghost.gguf")
    found = project(tmp_path / "ghost.gguf", DryRun((KvContext(512),), repack=False)).contexts[0].buffers
    assert [buffer.name for buffer in found] == ["CPU"]


@pytest.mark.parametrize("name", ["kimi-k2.5:Q4_K_S", "gpt-oss-120b:MXFP4", "llama-3.3-70b:Q4_K_M"])
def test_a_plan_is_verified(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    ghost.write(name, path)
    profile = read(path)
    found = verify(placed(profile, settings(32768, 2, cache_type="q8_0")), path)
    assert [(row.tier, row.item) for row in found.rows] == [
        ("host", "weights"),
        ("host", "kv"),
        ("host", "compute"),
        ("host", "repack"),
    ]
    assert [row.difference for row in found.rows] == pytest.approx([0, 0, 0, 0], abs=1e-4)
    assert (found.agrees, found.source, found.notes) == (True, "breakdown", ())
    # without the plan's GPUs, only sums over all memories can be compared
    away = verify(placed(profile, settings(), cards=2, resident=range(4)), path)
    assert [(row.tier, row.item, row.agrees) for row in away.rows] == [("all", "weights", True), ("all", "kv", True)]
    (note,) = away.notes
    assert "2" in note


PREDICTING = ["qwen3.5-35b-a3b:Q4_K_M", "glm-4.5:Q4_K_M", "deepseek-v3.2:Q4_K_M", "nemotron-3-super-120b-a12b:Q4_K_M"]


@pytest.mark.parametrize("name", PREDICTING)
def test_prediction_layers_are_loaded_and_cached_as_planned(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    ghost.write(name, path)
    profile = read(path)
    drafting = replace(settings(8192, 2), mtp=True, draft_tokens=3)
    found = verify(placed(profile, drafting), path)
    differences = {row.item: row.difference for row in found.rows}
    assert differences == pytest.approx({"weights": 0, "kv": 0, "compute": 0, "repack": 0, "draft": 0}, abs=0.001)


@pytest.mark.parametrize("kind", get_args(SyntheticKind))
def test_a_real_model_uses_the_memory_of_its_dry_run(kind: SyntheticKind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write(kind, generate.sizes(kind, {}), path)
    wanted = KvContext(512, batch=512, full_windows=True)
    found = project(path, DryRun((wanted,), repack=False)).contexts[0]
    check(read(path), wanted, found, compute_share=0.01)
    log = llama.run(path, "the tide", tokens=1, context=512).log
    (real,) = fit_params.parse_log(log)
    (dry,) = found.buffers
    assert real.model_bytes == pytest.approx(dry.model_bytes, abs=0.01 * MIB)
    assert real.context_bytes == pytest.approx(dry.context_bytes, abs=0.01 * MIB)
    assert real.compute_bytes == pytest.approx(dry.compute_bytes, abs=0.01 * MIB)


def test_refusals_of_llama_cpp_become_errors(tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    ghost.write("kimi-k2.5:Q4_K_S", path)
    with pytest.raises(EngineError, match="4096") as caught:
        project(path, DryRun((KvContext(4096, type_k="q8_0", type_v="f16"),)))
    assert "different K" in (caught.value.hint or "")
    with pytest.raises(EngineError, match="q6_0"):
        project(path, DryRun((KvContext(4096, type_k="q6_0"),)))
    with pytest.raises(EngineError, match="GPU0") as caught:
        project(path, DryRun((KvContext(4096),), overrides=(("exps", "GPU0"),)))
    assert "CPU" in (caught.value.hint or "")
    with pytest.raises(EngineError, match=r"ghost\.gguf"):
        project(path, DryRun((KvContext(4096),)), time_limit_s=0.01)


def test_files_that_are_not_models(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with pytest.raises(EngineError, match=r"broken\.gguf") as caught:
        project(broken, DryRun((KvContext(512),)))
    assert caught.value.hint
    with pytest.raises(EngineError, match=r"absent\.gguf"):
        project(tmp_path / "absent.gguf", DryRun((KvContext(512),)))


def test_a_library_of_the_user(tmp_path: Path) -> None:
    about = project(Path("unused"), DryRun(()))
    assert (about.devices, about.contexts) == (("CPU",), ())
    copy = tmp_path / "libllama.so"
    shutil.copy(about.library, copy)
    assert project(Path("unused"), DryRun(()), library=copy).library == str(copy)
    with pytest.raises(EngineError, match=r"absent\.so"):
        project(Path("unused"), DryRun(()), library=tmp_path / "absent.so")
