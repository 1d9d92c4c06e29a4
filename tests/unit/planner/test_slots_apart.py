"""llama-server's slots have separate caches; sequences of the native engine share one."""

from dataclasses import replace

import pytest

from support.run_models import model
from tokenmill.hardware.catalog import find
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.memory.kv_cells import KvContext, context_of, kv_bytes
from tokenmill.planner.plan import Item, Plan

EPYC = find("epyc-9175f")
SERVER = Goal(context=4096, sequences=8, cpu_only=True, ubatch=512)
NATIVE = replace(SERVER, full_windows=True)  # sequences share cells: the same goal asks for both


def planned(goal: Goal, name: str = "qwen3-32b:Q4_K_M") -> Plan:
    return make(EPYC, model(name), goal)


def of(plan: Plan, item: Item) -> int:
    return plan.ledger.of("dram", item)


@pytest.mark.parametrize(
    ("goal", "unified"),
    [
        (SERVER, False),
        (NATIVE, True),
        (replace(SERVER, sequences=1), True),
        (replace(SERVER, unified=True), True),
        (replace(NATIVE, unified=False), False),
    ],
)
def test_which_sequences_share_a_cache(goal: Goal, unified: bool) -> None:
    plan = planned(goal)
    assert plan.settings.unified is unified
    assert context_of(plan.settings).unified is unified
    assert context_of(plan.settings, unified=False).unified is False


@pytest.mark.parametrize("sequences", [8, 32])
def test_the_mask_is_of_one_slot(sequences: int) -> None:
    apart = planned(replace(SERVER, sequences=sequences))
    alone = planned(replace(SERVER, sequences=1))
    together = planned(replace(NATIVE, sequences=sequences))
    assert of(apart, "compute") == of(alone, "compute")
    mask = 512 * 4096 * 2  # rows, cells, bytes
    assert of(together, "compute") - of(apart, "compute") >= (sequences - 1) * mask
    assert of(apart, "kv") == of(together, "kv") == sequences * of(alone, "kv")


def test_every_slot_has_a_window_of_its_own() -> None:
    plan = planned(SERVER, "gpt-oss-120b:MXFP4_MOE")
    assert of(plan, "kv") == sum(kv_bytes(plan.profile, KvContext(4096, 8, unified=False)))
    assert of(plan, "kv") != of(planned(replace(SERVER, unified=True), "gpt-oss-120b:MXFP4_MOE"), "kv")
