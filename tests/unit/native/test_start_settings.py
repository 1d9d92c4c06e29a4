"""Conversion of a plan to settings of the native engine."""

from dataclasses import replace

import pytest

from support.plans import placed, settings
from tokenmill.errors import UsageError
from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.native.start import environment_of, settings_of
from tokenmill.native.verify import request
from tokenmill.units import GIB

KIMI = describe((catalog.header("kimi-k2.5:Q4_K_S"),), format="catalog")


def test_without_gpus() -> None:
    wanted = replace(settings(16384, 4), mlock=True, repack=False, threads=14, threads_batch=16, cache_type_k="q8_0")
    model, context = settings_of(placed(KIMI, wanted))
    assert model == ModelSettings(mmap=wanted.mmap, mlock=True, repack=False)
    assert context == ContextSettings(
        cells=65536,
        context=16384,
        sequences=4,
        ubatch=wanted.ubatch,
        batch=wanted.batch,
        cache_type_k="q8_0",
        cache_type_v=wanted.cache_type_v,
        flash_attention=wanted.flash_attention,
        threads=14,
        threads_batch=16,
    )
    assert environment_of(placed(KIMI, wanted)) == {}


def test_the_placement_is_the_one_that_is_verified() -> None:
    plan = placed(KIMI, replace(settings(), moe_cache_bytes=4 * GIB), cards=2, first=3, resident=range(3, 8))
    model, context = settings_of(plan, sequences=64)
    verified = request(plan)
    assert model.gpus == (0, 1)
    assert (model.gpu_layers, model.tensor_split) == (verified.gpu_layers, verified.tensor_split)
    assert model.overrides == verified.overrides != ()
    assert (context.sequences, context.moe_cache_bytes) == (64, 4 * GIB)


def test_many_sequences_raise_the_floor_for_moving_experts() -> None:
    plan = placed(KIMI, settings(4096, 48), cards=1, resident=range(2))
    assert environment_of(plan)["GGML_OP_OFFLOAD_MIN_BATCH"] == "128"


def test_plans_for_other_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="vllm"):
        settings_of(placed(KIMI, replace(settings(), engine="vllm")))
