"""Tensor tables of published checkpoints, written as sparse files: sizes must equal the published ones."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support import checkpoints
from support.safetensors_folder import write_folder
from tokenmill.model.huggingface.safetensors import read_folder
from tokenmill.model.profile import Experts, LayerCache, Profile, TensorClass
from tokenmill.units import GIB

CONFIGS = Path(__file__).parents[2] / "data" / "model" / "hf"
TABLES: dict[str, tuple[Callable[[], checkpoints.Rows], int]] = {
    "llama-4-scout-nvfp4": (checkpoints.scout_nvfp4, 13),
    "kimi-k2.5": (checkpoints.kimi_k25, 62),
    "deepseek-v3": (checkpoints.deepseek_v3, 30),
    "gpt-oss-120b": (checkpoints.gpt_oss_120b, 15),
    "qwen2.5-7b-awq": (checkpoints.qwen25_7b_awq, 2),
    "qwen3-next-80b": (checkpoints.qwen3_next, 41),
}
SECONDS: dict[str, float] = {}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Profile]:
    profiles: dict[str, Profile] = {}

    def once(name: str) -> Profile:
        if name not in profiles:
            rows, shards = TABLES[name]
            config = json.loads((CONFIGS / name / "config.json").read_text())
            folder = write_folder(tmp_path_factory.mktemp(name) / name, dict(rows()), config, shards=shards)
            for beside in CONFIGS.joinpath(name).glob("hf_quant_config.json"):
                shutil.copy(beside, folder)
            started = time.process_time()
            profiles[name] = read_folder(folder)
            SECONDS[name] = time.process_time() - started
            shutil.rmtree(folder)
        return profiles[name]

    return once


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_guessed_but_the_state_of_recurrent_layers(name: str, read: Callable[[str], Profile]) -> None:
    guesses = [guess for guess in read(name).guesses if "recurrent state" not in guess]
    assert guesses == []


@pytest.mark.parametrize("name", TABLES)
def test_every_text_tensor_has_a_class(name: str, read: Callable[[str], Profile]) -> None:
    unknown = [tensor.name for tensor in read(name).of(TensorClass.OTHER)]
    assert [item for item in unknown if not item.startswith(("vision_model.", "multi_modal_projector."))] == []


@pytest.mark.parametrize(
    ("name", "parameters", "giga_bytes", "active", "quantisation"),
    [
        ("llama-4-scout-nvfp4", 108_641_793_536, 65.345, None, "nvfp4"),
        ("kimi-k2.5", 1.03e12, 595, 32e9, "compressed-tensors w4a16"),
        ("deepseek-v3", 671e9 + 14e9, 688.586_727_753, 37e9, "fp8"),
        ("gpt-oss-120b", 116.83e9, 60.8 * GIB / 1e9, 5.13e9, "mxfp4"),
        ("qwen2.5-7b-awq", 7_615_616_512, 5.57, None, "awq-4bit"),
        ("qwen3-next-80b", 81_324_862_720, 162.65, None, "bf16"),
    ],
)
def test_sizes_as_published(
    name: str,
    parameters: float,
    giga_bytes: float,
    active: float | None,
    quantisation: str,
    read: Callable[[str], Profile],
) -> None:
    profile = read(name)
    exact = isinstance(parameters, int)
    assert profile.parameters == (parameters if exact else pytest.approx(parameters, rel=0.005))
    assert profile.bytes / 1e9 == pytest.approx(giga_bytes, rel=0.002)
    assert profile.quantisation == quantisation
    if active is not None:
        assert profile.active_parameters == pytest.approx(active, rel=0.015)


def test_scout_in_vllm(read: Callable[[str], Profile]) -> None:
    """vLLM 0.14 said 63.5 GiB of weights, and 110 256 tokens of bf16 cache in 20.2 GiB."""
    profile = read("llama-4-scout-nvfp4")
    assert profile.training_context == 10_485_760
    rotary_table_bytes = profile.training_context * 128 * 2
    assert (profile.bytes + rotary_table_bytes) / GIB == pytest.approx(63.5, rel=0.01)
    assert len(profile.cache) == 48
    assert {(cache.k_elements, cache.v_elements) for cache in profile.cache} == {(1024, 1024)}
    assert [cache.kind for cache in profile.cache[:4]] == ["chunked", "chunked", "chunked", "full"]
    assert sum(layer.bytes_per_token("bf16", "bf16") for layer in profile.cache) == 196_608
    assert pytest.approx(110_256, rel=0.001) == 20.2 * GIB / 196_608


def test_scout_by_type_and_class(read: Callable[[str], Profile]) -> None:
    profile = read("llama-4-scout-nvfp4")
    assert list(profile.by_type()) == ["NVFP4", "F8_E4M3", "BF16", "F32"]
    assert profile.experts == Experts(16, 1, 1)
    stacks = [tensor for tensor in profile.of(TensorClass.ROUTED_EXPERTS) if tensor.elements]
    assert {tensor.experts for tensor in stacks} == {16}
    assert sum(tensor.elements for tensor in stacks) == 48 * 16 * 3 * 5120 * 8192
    text_only = replace(profile, tensors=tuple(t for t in profile.tensors if t.cls is not TensorClass.OTHER))
    assert text_only.active_parameters == pytest.approx(16.1e9, rel=0.01)


def test_kimi_is_read_in_seconds_though_it_has_200_000_tensors(read: Callable[[str], Profile]) -> None:
    profile = read("kimi-k2.5")
    assert profile.experts == Experts(384, 8, 1)
    assert len(profile.tensors) < 1500
    assert profile.cache == (LayerCache("latent", 576, 512),) * 61
    assert profile.architecture == "kimi_k25"
    assert SECONDS["kimi-k2.5"] < 5


def test_multi_token_prediction_of_deepseek_is_a_separate_class(read: Callable[[str], Profile]) -> None:
    profile = read("deepseek-v3")
    further = sum(tensor.elements for tensor in profile.of(TensorClass.MTP))
    assert profile.parameters - further == pytest.approx(671.0e9, rel=0.001)
    assert {tensor.layer for tensor in profile.of(TensorClass.MTP)} == {61}
    assert len(profile.cache) == profile.layers == 61


def test_gpt_oss_alternates(read: Callable[[str], Profile]) -> None:
    profile = read("gpt-oss-120b")
    assert [(cache.kind, cache.span_tokens) for cache in profile.cache[:2]] == [("window", 128), ("full", None)]
    assert {t.experts for t in profile.of(TensorClass.ROUTED_EXPERTS) if t.elements and t.type == "MXFP4"} == {128}


def test_awq_has_its_widths_from_the_scales(read: Callable[[str], Profile]) -> None:
    assert read("qwen2.5-7b-awq").cache == (LayerCache("full", 512, 512),) * 28


def test_qwen3_next_mostly_recurs(read: Callable[[str], Profile]) -> None:
    profile = read("qwen3-next-80b")
    assert [cache.kind for cache in profile.cache].count("recurrent") == 36
    further = sum(tensor.elements for tensor in profile.of(TensorClass.MTP))
    assert profile.parameters - further == pytest.approx(79.67e9, rel=0.0005)
    assert profile.experts == Experts(512, 10, 1)
