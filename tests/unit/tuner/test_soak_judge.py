"""The usable context from measured steps, decided before memory runs out."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.tuner.soak.judge import ROUND, Limit, MemoryReading, SoakStep, growth, judge
from tokenmill.units import GIB, MIB

LIMIT = Limit(goal=32768, step=4096, reserve_bytes=(("dram", 512 * MIB), ("gpu0", 512 * MIB)))


def step(depth: int, used: int | None, free: int | None, *, tier: str = "dram", whole: bool = True) -> SoakStep:
    return SoakStep(depth, 1, (MemoryReading(tier, None, used, free),), 100.0, 10.0, whole=whole)


def line(depths: Sequence[int], *, start: int, per_token: int, free: int, tier: str = "dram") -> list[SoakStep]:
    """Steps of an engine that takes so much for each token, of memory that had so much free at the first."""
    return [
        step(depth, start + per_token * (depth - depths[0]), free - per_token * (depth - depths[0]), tier=tier)
        for depth in depths
    ]


def test_nothing_tried_goes_on() -> None:
    assert judge([], LIMIT).should_continue


def test_room_for_the_next_step_goes_on() -> None:
    verdict = judge(line([4096, 8192], start=GIB, per_token=1000, free=8 * GIB), LIMIT)
    assert verdict.should_continue
    assert verdict.usable_context == 8192


def test_stops_before_the_crash_and_says_how_far_one_can_go() -> None:
    # 100 KiB a token: 400 MiB a step; 600 MiB above the reserve are left at 8192, so 14336 is the last safe depth
    steps = line([4096, 8192, 12288], start=GIB, per_token=100 * 1024, free=(512 + 600 + 400) * MIB)
    assert judge(steps[:2], LIMIT).should_continue
    verdict = judge(steps, LIMIT)
    assert (verdict.should_continue, verdict.usable_context, verdict.tier) == (False, 14336, "dram")
    assert verdict.left_bytes == 512 * MIB
    assert re.findall(r"[\d.,]+ [KMG]iB", verdict.reason) == ["512.0 MiB", "512.0 MiB", "97.7 MiB", "1.3 GiB"]


def test_the_tightest_memory_decides() -> None:
    host = line([4096, 8192], start=GIB, per_token=1000, free=8 * GIB)
    card = line([4096, 8192], start=20 * GIB, per_token=200 * 1024, free=(512 + 1000) * MIB, tier="gpu0")
    both = [replace(one, memory=(*one.memory, *two.memory)) for one, two in zip(host, card, strict=True)]
    verdict = judge(both, LIMIT)
    assert (verdict.should_continue, verdict.tier, verdict.usable_context) == (False, "gpu0", 9216)
    assert "gpu0 would have" in verdict.reason


def test_all_of_it_filled() -> None:
    verdict = judge(line([16384, 32768], start=GIB, per_token=10, free=2 * GIB), LIMIT)
    assert (verdict.should_continue, verdict.usable_context) == (False, 32768)
    assert (verdict.tier, round((verdict.left_bytes or 0) / GIB, 2)) == ("dram", 2.0)
    assert re.findall(r"[\d.]+ [KMG]iB", verdict.reason) == ["2.0 GiB", "512.0 MiB"]


def test_unreadable_memory() -> None:
    steps = [SoakStep(32768, 1, (), 100.0, 10.0)]
    assert judge([replace(steps[0], depth=4096)], LIMIT).should_continue
    verdict = judge(steps, LIMIT)
    assert (verdict.should_continue, verdict.usable_context) == (False, 32768)
    assert (verdict.tier, verdict.left_bytes) == (None, None)


@pytest.mark.parametrize(
    ("steps", "usable"),
    [
        ([step(4096, GIB, 100 * MIB)], 0),
        ([step(4096, GIB, 2 * GIB), step(8192, 2 * GIB, 100 * MIB)], 4096),
        ([step(4096, GIB, 2 * GIB), step(8192, 2 * GIB, 2 * GIB, whole=False)], 4096),  # broken off on the way
        ([step(4096, GIB, 2 * GIB), step(8192, GIB, 100 * MIB), step(12288, GIB, 2 * GIB)], 4096),
    ],
)
def test_memory_that_has_run_short_leaves_what_was_safe_before(steps: list[SoakStep], usable: int) -> None:
    verdict = judge(steps, LIMIT)
    assert (verdict.should_continue, verdict.usable_context) == (False, usable)


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ([100, 200], 0.1),
        ([100, 200, 600], 0.4),  # lately more than overall
        ([100, 900, 900], 0.4),  # and the other way round
        ([900, 100], 0.0),  # what shrinks does not grow
        ([100], None),
        ([None, None], None),
    ],
)
def test_growth_is_the_larger_of_lately_and_overall(used: list[int | None], expected: float | None) -> None:
    steps = [step(1000 * (at + 1), each, None) for at, each in enumerate(used)]
    assert growth(steps, "dram") == (None if expected is None else pytest.approx(expected))


def test_growth_from_free_memory_if_the_engines_use_is_unknown() -> None:
    assert growth([step(1000, None, 5000), step(2000, None, 3000)], "dram") == 2.0


@st.composite
def soaks(draw: st.DrawFn) -> tuple[list[SoakStep], Limit]:
    goal = draw(st.integers(1024, 100_000))
    size = draw(st.integers(256, goal))
    count = draw(st.integers(1, min(12, -(-goal // size))))
    depths = [min(goal, size * (at + 1)) for at in range(count)]
    used, steps = draw(st.integers(0, 1 << 40)), []
    free = draw(st.integers(0, 1 << 36))
    for depth in depths:
        grown = draw(st.integers(-(1 << 20), 1 << 30))
        used, free = max(0, used + grown), free - grown - draw(st.integers(-(1 << 24), 1 << 24))
        steps.append(step(depth, used, free))
    return steps, Limit(goal, size, (("dram", draw(st.integers(0, 1 << 32))),))


@given(soaks())
def test_never_more_than_what_was_safe_and_the_growth_allows(soak: tuple[list[SoakStep], Limit]) -> None:
    steps, limit = soak
    verdict = judge(steps, limit)
    safe = [one for one in steps if (one.memory[0].free_bytes or 0) >= limit.reserve("dram")]
    first_bad = next((at for at, one in enumerate(steps) if one not in safe), len(steps))
    deepest = steps[first_bad - 1].depth if first_bad else 0
    assert 0 <= verdict.usable_context <= limit.goal
    assert verdict.usable_context >= deepest
    if verdict.should_continue or first_bad < len(steps):
        assert verdict.usable_context == deepest
    elif verdict.usable_context > deepest:
        slope = growth(steps, "dram")
        assert slope is not None
        last = steps[-1].memory[0].free_bytes or 0
        assert last - slope * (verdict.usable_context - deepest) >= limit.reserve("dram") - slope
        assert verdict.usable_context % ROUND == 0 or verdict.usable_context == limit.goal


@given(soaks(), st.integers(0, 1 << 34))
def test_more_memory_never_means_less_context(soak: tuple[list[SoakStep], Limit], more: int) -> None:
    steps, limit = soak
    richer = [
        replace(one, memory=tuple(replace(r, free_bytes=(r.free_bytes or 0) + more) for r in one.memory))
        for one in steps
    ]
    poor, rich = judge(steps, limit), judge(richer, limit)
    if rich.should_continue:  # it would have continued: the safe depth is at least the same
        assert not poor.should_continue or poor.usable_context == rich.usable_context
        assert rich.usable_context == steps[-1].depth
    else:
        assert rich.usable_context >= poor.usable_context


@given(soaks(), st.integers(0, 1 << 32))
def test_a_larger_reserve_never_means_more_context(soak: tuple[list[SoakStep], Limit], more: int) -> None:
    steps, limit = soak
    stricter = replace(limit, reserve_bytes=(("dram", limit.reserve("dram") + more),))
    loose, strict = judge(steps, limit), judge(steps, stricter)
    if strict.should_continue:
        assert loose.should_continue or loose.usable_context >= strict.usable_context
    elif not loose.should_continue:
        assert strict.usable_context <= loose.usable_context
