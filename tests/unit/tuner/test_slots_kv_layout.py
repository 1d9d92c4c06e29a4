"""When slots get KV cells of their own: the arithmetic, and the configuration of the engine."""

import asyncio

import pytest

from support.slot_engines import LayoutEngine
from tokenmill.engine.engine import KvLayout
from tokenmill.errors import EngineError, UsageError
from tokenmill.tuner.slots import (
    MAX_SHARED,
    MIN_JOBS_PER_SLOT,
    PER_SLOT_GAIN,
    PrefixSharing,
    Workload,
    fit,
    layout_for,
)

ALONE = Workload(40, sharing=PrefixSharing(168, 0.0, 32))
SHARED = Workload(40, sharing=PrefixSharing(168, 150.0, 32))


@pytest.mark.parametrize(
    ("shared", "jobs", "slots", "wanted"),
    [
        (0.0, 100, 8, "per_slot"),
        (MAX_SHARED * 200, 100, 8, "per_slot"),
        (MAX_SHARED * 200 + 0.1, 100, 8, "unified"),
        (150.0, 100, 8, "unified"),
        (0.0, MIN_JOBS_PER_SLOT * 8 - 1, 8, "unified"),  # the batch ends before it pays
        (0.0, 100, 1, "unified"),  # no other slot
    ],
)
def test_the_loss_is_compared_with_the_gain(shared: float, jobs: int, slots: int, wanted: KvLayout) -> None:
    assert layout_for(PrefixSharing(168, shared, 32), jobs, slots) == wanted


@pytest.mark.parametrize("output_tokens", [1.0, 24.0, 32.0])
def test_short_answers_are_no_reason_for_a_unified_cache(output_tokens: float) -> None:
    assert layout_for(PrefixSharing(105, 0.0, output_tokens), 64, 8) == "per_slot"


def test_it_never_loses_more_than_it_gains() -> None:
    assert 0 < MAX_SHARED < PER_SLOT_GAIN
    assert PrefixSharing(0, 0, 0).share == 0


@pytest.mark.parametrize(
    ("before", "workload", "after"),
    [
        ("unified", ALONE, "per_slot"),
        ("per_slot", ALONE, "per_slot"),
        ("unified", SHARED, "unified"),
        ("per_slot", SHARED, "unified"),
        ("per_slot", Workload(40), "per_slot"),  # nothing is known of its prompts
    ],
)
def test_the_point_has_the_layout_in_force(before: KvLayout, workload: Workload, after: KvLayout) -> None:
    engine = LayoutEngine(kv_layout=before)
    point = asyncio.run(fit(engine, workload))
    assert point.kv_layout == engine.kv_layout == after
    assert engine.set_to == ([] if before == after else [after])
    assert (point.layout_reason is None) is (before == after)
    assert (point.slots, point.measured) == (4, False)


@pytest.mark.parametrize(
    "engine",
    [
        LayoutEngine(changes_kv_layout=False),
        LayoutEngine(refuses=EngineError("not with this model")),
        LayoutEngine(refuses=UsageError("too few cells")),
    ],
)
def test_an_engine_that_cannot_change_its_layout_keeps_it(engine: LayoutEngine) -> None:
    point = asyncio.run(fit(engine, ALONE))
    assert (point.kv_layout, point.layout_reason) == ("unified", None)
    assert engine.set_to == []
