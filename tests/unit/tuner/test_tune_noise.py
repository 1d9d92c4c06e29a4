"""Aggregation of repeats, and their spread."""

from random import Random

import pytest

from tokenmill.tuner.point import Figures, Trial, TrialSettings
from tokenmill.tuner.search.noise import middle, spread, standings

ONE, TWO = TrialSettings(8, 8, 4, 512, 8192), TrialSettings(8, 8, 8, 512, 8192)


def trial(dials: TrialSettings, tok_s: float, **more: object) -> Trial:
    return Trial(dials, "measured", Figures(decode_tok_s=tok_s), **more)  # type: ignore[arg-type]


def test_median_of_what_was_measured() -> None:
    figures = middle(
        [
            Figures(decode_tok_s=10.0, host_bytes=3),
            Figures(decode_tok_s=30.0, first_token_s=1.0, host_bytes=4),
            Figures(decode_tok_s=11.0),
        ]
    )
    assert figures == Figures(decode_tok_s=11.0, first_token_s=1.0, host_bytes=4)
    assert middle([]) == Figures()


def test_disturbed_and_crashed_trials_do_not_count() -> None:
    found = standings(
        [
            trial(ONE, 10.0, seconds=1.0),
            trial(ONE, 99.0, disturbed="make used 2 cores"),
            Trial(TWO, "died"),
            trial(ONE, 12.0, seconds=2.0, loaded=True),
        ]
    )
    assert [(each.dials, each.count) for each in found] == [(ONE, 2)]
    whole = found[0].as_trial()
    assert (whole.figures.decode_tok_s, whole.seconds, whole.loaded) == (11.0, 3.0, True)


def test_spread_needs_repeats() -> None:
    assert spread([]) is None
    assert spread([trial(ONE, 10.0), trial(ONE, 11.0), trial(TWO, 50.0)]) is None
    assert spread([trial(ONE, 10.0)] * 4) == 0.0


def test_spread_is_the_relative_deviation_of_all_repeats_together() -> None:
    draw = Random(1)
    trials = [
        trial(dials, level * draw.gauss(1, 0.05)) for dials, level in ((ONE, 10.0), (TWO, 300.0)) for _ in range(200)
    ]
    assert spread(trials) == pytest.approx(0.05, rel=0.1)
    assert spread(trials, "jobs_tok_s") is None
