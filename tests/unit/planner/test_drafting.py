"""Memory of prediction layers and draft models, and what cannot be planned."""

from dataclasses import replace

import pytest

from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.goal import Goal, Speculation
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB


def model(name: str) -> Profile:
    return describe((catalog.header(name, words=False),), format="catalog")


def plan(profile: Profile, goal: Goal, machine: str = "h200-1x") -> Plan:
    return make(find(machine), profile, replace(goal, context=8192, sequences=2, ubatch=512))


QWEN = model("qwen3.5-35b-a3b:Q4_K_M")
PREDICTION_BYTES = sum(tensor.bytes for tensor in QWEN.of(TensorClass.MTP))


def test_prediction_layers_are_loaded_and_get_a_context_on_the_gpu() -> None:
    without, with_mtp = plan(QWEN, Goal()), plan(QWEN, Goal(speculation=Speculation(3)))
    ledgers = without.ledger, with_mtp.ledger
    plain, drafting = (ledger.of("gpu0", "weights") for ledger in ledgers)
    assert drafting - plain == PREDICTION_BYTES
    # one layer of K and V for two slots of 8192 tokens, and its buffer
    cache = 2 * 8192 * 2 * 512 * 2
    assert cache < ledgers[1].of("gpu0", "draft") < cache + 200 * MIB
    assert ledgers[0].of("gpu0", "draft") == 0


def test_recurrent_states_have_a_snapshot_for_every_drafted_token() -> None:
    state = sum(layer.state_bytes for layer in QWEN.cache)
    none, one, three = (
        plan(QWEN, Goal(speculation=wanted)).ledger.of("gpu0", "kv")
        for wanted in (None, Speculation(1), Speculation(3))
    )
    assert (one - none, three - none) == (2 * state, 2 * 3 * state)  # of two slots


def test_models_that_cannot_take_tokens_back_keep_no_snapshots() -> None:
    deepseek = model("deepseek-v3.2:Q4_K_M")
    none, three = (plan(deepseek, Goal(speculation=wanted), "epyc-9175f").ledger for wanted in (None, Speculation(3)))
    assert sum(row.bytes for row in three.full_context if row.item == "kv") == sum(
        row.bytes for row in none.full_context if row.item == "kv"
    )


def test_a_draft_model_is_counted_whole() -> None:
    target, small = model("qwen3-32b:Q8_0"), model("qwen3-32b:Q4_K_M")
    found = plan(target, Goal(speculation=Speculation(4, small, "small.gguf"))).ledger
    context = 2 * 8192 * small.kv_bytes_per_token()["f16"]["per_token"]
    assert found.of("gpu0", "draft") > small.bytes + context
    assert found.of("gpu0", "weights") < target.bytes


def test_on_the_cpu_drafting_takes_host_memory() -> None:
    found = plan(QWEN, Goal(cpu_only=True, speculation=Speculation(3))).ledger
    assert found.of("dram", "draft") > 0
    assert found.of("dram", "weights") == QWEN.bytes


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("kimi-k2.5:Q4_K_S", Goal(speculation=Speculation(3))),  # a file without such layers
        ("qwen3.5-35b-a3b:Q4_K_M", Goal(engine="vllm", speculation=Speculation(3))),
        ("qwen3.5-35b-a3b:Q4_K_M", Goal(engine="llama.cpp-2025", speculation=Speculation(3))),
        ("qwen3.5-35b-a3b:Q4_K_M", Goal(speculation=Speculation(3, model("qwen3-32b:Q8_0"), "other.gguf"))),
    ],
)
def test_what_cannot_draft_is_refused(name: str, goal: Goal) -> None:
    with pytest.raises(UsageError) as refused:
        plan(model(name), goal)
    assert refused.value.hint
