"""Bounds of untried values of one setting, and which value is tried next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.tuner.search.curves import WorthCurve, bound, exponent, probe

SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def test_exponent_is_one_where_speed_is_proportional() -> None:
    assert exponent(2, 10.0, 8, 40.0) == pytest.approx(1.0)
    assert exponent(2, 10.0, 8, 10.0) == 0.0
    assert exponent(16, 91.2, 32, 19.2) < -2


@pytest.mark.parametrize(
    ("seen", "at", "low", "high"),
    [
        ({16: 50.0}, 32, 100.0, 110.0),  # one point: proportional, and a little more
        ({8: 84.1, 16: 91.2}, 24, 95.0, 105.0),  # it hardly rises any more
        ({16: 91.2, 32: 19.2}, 64, 38.0, 42.0),  # behind a cliff: no more than proportional
        ({16: 91.2, 32: 80.0}, 64, 160.0, 175.0),  # behind a small fall: a second rise could win
        ({8: 38.7, 12: 51.6, 16: 54.3}, 4, 15.0, 30.0),  # steeply rising: below there is nothing
        ({1: 57.0, 4: 35.0, 8: 49.0}, 2, 100.0, 125.0),  # a cliff in the gap: what comes after says nothing
    ],
)
def test_bound(seen: dict[int, float], at: int, low: float, high: float) -> None:
    assert low <= bound(WorthCurve(SEQUENCES, seen), at) <= high


def test_nothing_below_and_one_above_is_no_bound() -> None:
    assert bound(WorthCurve(SEQUENCES, {16: 90.0}), 4) == float("inf")


def test_gap_that_may_hide_a_cliff_is_looked_into_first() -> None:
    assert probe(WorthCurve(SEQUENCES, {2: 50.0, 64: 60.0}), 61.0) in (8, 12)


def test_cliff_ends_the_line() -> None:
    """At 32 it falls so far that twice as many cannot make up for it."""
    seen = {1: 46.9, 2: 75.6, 4: 76.9, 8: 84.1, 12: 88.0, 16: 91.2, 24: 91.0, 32: 19.2}
    assert probe(WorthCurve(SEQUENCES, seen, from_first=True), 91.2 * 1.03) is None


def test_fall_that_could_be_followed_by_a_rise_is_looked_behind() -> None:
    seen = {1: 46.9, 2: 75.6, 4: 76.9, 8: 84.1, 12: 88.0, 16: 91.2, 24: 91.0, 32: 80.0}
    assert probe(WorthCurve(SEQUENCES, seen), 91.2 * 1.03) in (48, 64)


def test_crash_is_approached_by_halves() -> None:
    assert probe(WorthCurve(SEQUENCES, {4: 40.0}, frozenset({64})), 41.0) in (12, 16, 24)


def test_fitted_forecast_rules_values_out() -> None:
    line = WorthCurve(tuple(range(8, 17)), {8: 38.7, 12: 51.6, 16: 54.3})
    assert probe(line, 56.0) in (14, 15)
    assert probe(line, 56.0, lambda _: 50.0) is None
    assert probe(line, 56.0, lambda value: 50.0 if value == 15 else None) == 14


values = st.lists(st.integers(1, 200), min_size=1, max_size=20, unique=True).map(lambda found: tuple(sorted(found)))


@settings(max_examples=200, deadline=None)
@given(values=values, data=st.data())
def test_line_is_walked_to_its_end(values: tuple[int, ...], data: st.DataObject) -> None:
    """Whatever is measured or crashes: only open values are tried, each once, and at the end none can win."""
    shut: set[int] = set()
    seen: dict[int, float] = {}
    while True:
        line = WorthCurve(values, seen, frozenset(shut), from_first=data.draw(st.booleans()))
        bar = max(seen.values(), default=0.0) * 1.03
        value = probe(line, bar)
        if value is None:
            break
        assert value in line.open()
        worth = data.draw(st.none() | st.floats(0.001, 1000))
        if worth is None:
            shut.add(value)
        else:
            seen[value] = worth
    assert all(bound(line, value) <= bar for value in line.open())
