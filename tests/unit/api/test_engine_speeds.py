"""Speeds for a forecast from measurements: the newest build, numbers of slots, missing figures."""

import pytest

from tokenmill.api.engines.speeds import speeds_of_history, with_one_slot
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings


def measured(
    sequences: int,
    *,
    build: str = "b2",
    day: int = 1,
    decode_tok_s: float | None = None,
    prefill_tok_s: float | None = None,
) -> SpeedRecord:
    dials = TrialSettings(threads=8, threads_batch=8, sequences=sequences, ubatch=512, context=4096)
    when = f"2026-11-{day:02}T00:00:00+00:00"
    figures = Figures(decode_tok_s=decode_tok_s, prefill_tok_s=prefill_tok_s)
    return SpeedRecord(when, "here", "id", "m", "m", "native", build, "bench", dials, 0, figures, Figures())


ONE, FOUR = measured(1, decode_tok_s=10.0, prefill_tok_s=90.0), measured(4, day=2, decode_tok_s=30.0)


def test_measurements_with_different_slots_are_combined() -> None:
    found = speeds_of_history([ONE, FOUR], 4)
    assert found is not None
    assert found.rates.decode_tok_s == ((1, 10.0), (4, 30.0))
    assert (found.rates.prefill_tok_s, found.width, found.measured) == (90.0, 4, True)
    assert found.source == "measured 2026-11-02 with b2"


def test_the_newest_build_and_figure_count() -> None:
    old = measured(4, build="b1", decode_tok_s=99.0, prefill_tok_s=999.0)
    again = measured(4, day=3, decode_tok_s=33.0, prefill_tok_s=95.0)
    found = speeds_of_history([old, ONE, FOUR, again], 4)
    assert found is not None
    assert (found.rates.decode_at(4), found.rates.prefill_tok_s) == (33.0, 95.0)


@pytest.mark.parametrize(
    ("speeds", "width"),
    [
        ([], 4),
        ([FOUR], 4),  # no prefill
        ([measured(1, prefill_tok_s=90.0)], 1),  # no decode
        ([ONE], 8),  # one slot does not predict eight
    ],
)
def test_too_few_measurements_give_no_speed(speeds: list[SpeedRecord], width: int) -> None:
    assert speeds_of_history(speeds, width) is None


def test_without_a_number_of_slots_the_largest_measured_counts() -> None:
    found = speeds_of_history([ONE, FOUR], None)
    assert found is not None
    assert found.width == 4


def test_one_slot_has_at_least_its_share() -> None:
    assert with_one_slot([(8, 40.0)]) == ((1, 5.0), (8, 40.0))
    assert with_one_slot([(4, 30.0), (1, 10.0)]) == ((1, 10.0), (4, 30.0))
