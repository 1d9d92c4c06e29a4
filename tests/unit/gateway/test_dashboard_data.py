"""Data of the dashboard: rates, medians, memories, and the most used part of a large prefix tree."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Counters
from tokenmill.engine.reconcile.reconcile import ReconciledItem, Reconciliation
from tokenmill.gateway.monitoring.memory_view import MemorySize, memory_view
from tokenmill.gateway.monitoring.throughput import CounterRates, quantile
from tokenmill.gateway.monitoring.view import MAX_PREFIXES, _most_used, _parents, with_digests

GENERATED = "generated_tokens"


def paced(*looks: tuple[float, Counters]) -> CounterRates:
    rates = CounterRates(window_s=3.0)
    for now_s, counters in looks:
        rates.add(now_s, counters)
    return rates


def test_a_rate_is_of_the_last_seconds() -> None:
    rates = paced(
        *((float(at), Counters(generated_tokens=at * (100 if at < 10 else 0) + 900 * (at >= 10))) for at in range(20))
    )
    assert rates.per_s(GENERATED) == 0
    assert paced((0.0, Counters(generated_tokens=0)), (2.0, Counters(generated_tokens=30))).per_s(GENERATED) == 15


@pytest.mark.parametrize(
    "looks",
    [
        [(0.0, Counters(generated_tokens=5))],  # one poll gives no rate
        [(0.0, Counters()), (1.0, Counters())],  # it does not count
        [(0.0, Counters(generated_tokens=500)), (1.0, Counters(generated_tokens=2))],  # another life
        [(0.0, Counters(generated_tokens=5, restarts=0)), (1.0, Counters(generated_tokens=9, restarts=1))],
        [(0.0, Counters(generated_tokens=5)), (60.0, Counters(generated_tokens=900))],  # a gap without polls
    ],
)
def test_where_there_is_no_rate(looks: list[tuple[float, Counters]]) -> None:
    assert paced(*looks).per_s(GENERATED) is None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40))
def test_rates_are_never_negative(grown: list[int]) -> None:
    total, rates = 0, CounterRates(window_s=3.0)
    for at, more in enumerate(grown):
        total += more
        rates.add(float(at), Counters(generated_tokens=total))
        rate = rates.per_s(GENERATED)
        assert rate is None or 0 <= rate <= 50


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([4.0, 1.0, 3.0, 2.0, 5.0], 0.95, 5.0)],
)
def test_quantiles(values: list[float], share: float, found: float | None) -> None:
    assert quantile(values, share) == found


def ups(*rows: ReconciledItem) -> Any:
    return {"here": SimpleNamespace(held=Reconciliation(rows))}


def test_pages_of_a_mapped_model_are_not_free() -> None:
    rows = (
        ReconciledItem("host", "weights", 100, 100, "engine"),
        ReconciledItem("host", "kv", 50, 60, "engine"),
        ReconciledItem("host", "mapped", 100, 110, "process"),
    )
    (host,) = memory_view(ups(*rows), {"host": MemorySize(1000, 700)})
    assert (host["free_bytes"], host["other_bytes"]) == (590, 250)
    assert [part["item"] for part in host["parts"]] == ["weights", "kv"]
    assert [part["item"] for part in host["sums"]] == ["mapped"]


def test_unknown_rooms_stay_unknown_and_gpus_come_first() -> None:
    rows = (
        ReconciledItem("host", "weights", 100, None, "engine"),
        ReconciledItem("gpu1", "weights", 70, 70, "engine"),
        ReconciledItem("gpu0", "kv", 5, 5, "engine"),
        ReconciledItem("gpu0", "compute", 0, 0, "engine"),
    )
    tiers = memory_view(ups(*rows), {"gpu0": MemorySize(80, 60)})
    assert [tier["tier"] for tier in tiers] == ["gpu0", "gpu1", "host"]
    assert [len(tier["parts"]) for tier in tiers] == [1, 1, 1]
    assert tiers[0]["other_bytes"] == 15
    assert tiers[2]["free_bytes"] is tiers[2]["other_bytes"] is tiers[2]["capacity_bytes"] is None


@st.composite
def prefix_trees(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Depth first: one can be at most one deeper than the one before it."""
    heads: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 2 * MAX_PREFIXES))):
        deepest = heads[-1]["depth"] + 1 if heads else 0
        depth = draw(st.integers(0, min(deepest, 6)))
        heads.append({"id": number, "depth": depth, "hits": draw(st.integers(0, 9)), "pinned": draw(st.booleans())})
    return heads


@given(prefix_trees())
def test_shown_prefixes_have_their_ancestors_shown(heads: list[dict[str, Any]]) -> None:
    shown = _most_used(heads)
    assert len(shown) == len(heads) if len(heads) <= MAX_PREFIXES else 0 < len(shown) <= MAX_PREFIXES
    kept = [head["id"] for head in shown]
    assert kept == sorted(kept), "the order stays"
    above = _parents(heads)
    assert all(above[number] is None or above[number] in kept for number in kept)


def pinned(start: int, tokens: int, *, pinned: bool = True) -> dict[str, Any]:
    return {"start": start, "tokens": tokens, "pinned": pinned}


@pytest.mark.parametrize(
    ("heads", "names"),
    [
        ([pinned(0, 207)], ["mill"]),
        ([pinned(0, 4), pinned(4, 209)], [None, "mill"]),  # chats have more than the digest in common
        ([pinned(0, 207, pinned=False)], [None]),
        ([pinned(0, 4), pinned(4, 300), pinned(4, 209)], [None, None, None]),  # either could be it
        ([pinned(0, 4), pinned(4, 300), pinned(4, 203)], [None, None, "mill"]),
        ([pinned(0, 100)], [None]),  # it is not whole
    ],
)
def test_digests_are_named_where_they_are_sure(heads: list[dict[str, Any]], names: list[str | None]) -> None:
    assert [head["digest"] for head in with_digests(heads, {"mill": 207})] == names
