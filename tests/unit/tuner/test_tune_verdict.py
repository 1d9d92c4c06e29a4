"""The operating point: the choice, its costs, the front and the knee."""

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tune_surfaces import RECORDED, SEQUENCES, kimi_threads, recorded, tried
from tokenmill.errors import TokenmillError
from tokenmill.tuner.point import Aim, Figures, OperatingPoint, PointScope, Trial, TrialSettings
from tokenmill.tuner.search.noise import standings
from tokenmill.tuner.search.objectives import yardstick
from tokenmill.tuner.search.tradeoffs import beats, front, score
from tokenmill.tuner.search.verdict import point
from tokenmill.units import GIB

PLACE = PointScope("box", "m1", "kimi", "k1", "native", "b11549")
BASE = TrialSettings(16, 16, 1, 512, 8192)


def decided(
    trials: list[Trial], aim: Aim | None = None, *, noise: float = 0.03, host: bool | None = None
) -> OperatingPoint:
    return point(PLACE, aim or Aim(), trials, noise, seconds=12.0, when="2026-11-15T10:00:00+00:00", host_experts=host)


def by_sequences(name: str, **more: object) -> list[Trial]:
    curve = recorded(name)["by_sequences"]
    return [
        Trial(replace(BASE, sequences=int(count)), "measured", replace(Figures(decode_tok_s=rate), **more))  # type: ignore[arg-type]
        for count, rate in curve.items()
    ]


def numbers(sentence: str) -> list[str]:
    return re.findall(r"\d+", sentence)


def by_threads() -> list[Trial]:
    return [
        tried(kimi_threads, replace(BASE, threads=count, threads_batch=count), Random(0)) for count in (12, 13, 14, 16)
    ]


def test_cliff_has_a_possible_reason_only_with_experts_on_the_host() -> None:
    cliff = "beyond 16 sequences tok/s falls from 91 to 19.2 at 32"
    trials = by_sequences("h200-experts-on-cpu")
    assert decided(trials, host=True).knee.startswith(f"{cliff}: possibly because llama.cpp computes 32 rows and more")
    assert decided(trials, host=False).knee == cliff
    assert decided(trials).knee == cliff  # nothing says that there is a GPU
    assert "possibly" in decided(by_sequences("h200-experts-on-cpu", host_bytes=37 * GIB, gpu_bytes=6 * GIB)).knee
    assert decided(by_sequences("h200-experts-on-cpu", host_bytes=GIB, gpu_bytes=39 * GIB)).knee == cliff
    elsewhere = [trial for trial in trials if trial.dials.sequences != 16]
    moved = [replace(trial, dials=replace(trial.dials, offload_min_batch=128)) for trial in elsewhere]
    assert "possibly" not in decided(moved, host=True).knee  # the threshold is not where it falls


def test_knee_without_a_fall() -> None:
    assert numbers(decided(by_sequences("h200-all-on-gpu")).knee) == ["16", "1866", "16", "1983"]
    rising = [
        Trial(replace(BASE, sequences=count), "measured", Figures(decode_tok_s=10.0 * count)) for count in SEQUENCES
    ]
    assert numbers(decided(rising).knee) == ["64", "640"]
    flat = [Trial(replace(BASE, sequences=count), "measured", Figures(decode_tok_s=100.0)) for count in (1, 2, 4)]
    assert numbers(decided(flat).knee) == ["100", "1", "100", "4"]
    ended = [*rising[:4], Trial(replace(BASE, sequences=12), "out of memory")]
    assert numbers(decided(ended).knee) == ["12", "8"]
    assert numbers(decided(rising[:1]).knee) == []


def test_knee_of_threads() -> None:
    curve = recorded("h200-experts-on-cpu")["by_threads"]
    trials = [
        Trial(replace(BASE, threads=int(count), threads_batch=int(count)), "measured", Figures(decode_tok_s=rate))
        for count, rate in curve.items()
    ]
    assert decided(trials).knee == "beyond 14 threads tok/s falls from 58 to 54 at 16"
    assert decided(trials).dials.threads == 14


def test_thirteen_of_sixteen_threads() -> None:
    """The published rule, by jobs that read as much as they write: 12 threads lose too much in prefill."""
    found = decided(by_threads(), Aim("cores", within=0.11))
    assert found.dials.threads == 13
    assert found.given_up[0] == "13 threads instead of 16: 10 % less, three cores free"
    assert decided(by_threads(), Aim("cores", within=0.10)).dials.threads == 14
    assert decided(by_threads()).dials.threads == 16


def test_what_noise_cannot_tell_apart_takes_least() -> None:
    trials = [
        Trial(replace(BASE, threads=count, threads_batch=count), "measured", Figures(decode_tok_s=rate))
        for count, rate in ((4, 80.0), (13, 99.0), (16, 100.0))
    ]
    found = decided(trials)
    assert found.dials.threads == 13
    assert found.given_up == (
        "13 threads instead of 16: 1 % less, three cores free",
        "4 threads instead of 13 would give nine cores free, for 19 % less throughput",
    )


def test_jobs_count_where_they_were_measured() -> None:
    trials = [
        Trial(replace(BASE, sequences=1), "measured", Figures(decode_tok_s=90.0, jobs_tok_s=50.0)),
        Trial(replace(BASE, sequences=8), "measured", Figures(decode_tok_s=80.0, jobs_tok_s=70.0)),
        Trial(replace(BASE, sequences=16), "measured", Figures(decode_tok_s=900.0)),  # not comparable
    ]
    assert decided(trials).dials.sequences == 8
    assert decided([replace(t, figures=replace(t.figures, jobs_tok_s=None)) for t in trials]).dials.sequences == 16


def waiting(sequences: int, tok_s: float, first_s: float, **more: object) -> Trial:
    figures = Figures(decode_tok_s=tok_s, first_token_s=first_s)
    return Trial(replace(BASE, sequences=sequences, **more), "measured", figures)  # type: ignore[arg-type]


def test_first_token_and_what_it_costs() -> None:
    trials = [waiting(1, 40.0, 0.2), waiting(4, 70.0, 0.8), waiting(16, 90.0, 2.4)]
    assert decided(trials, Aim("latency", first_token_s=1.0)).dials.sequences == 4
    assert decided(trials, Aim("latency", first_token_s=1.0)).given_up[0] == (
        "4 sequences instead of 16: 22 % less, first token after 0.8 s instead of 2.4"
    )
    assert decided(trials, Aim("latency")).dials.sequences == 1
    late = decided(trials, Aim("latency", first_token_s=0.1))
    assert late.dials.sequences == 1
    assert "within 0.1 s" in late.given_up[0]
    assert decided(trials).given_up == (
        "4 sequences instead of 16 would give first token after 0.8 s instead of 2.4, for 22 % less throughput",
    )


def test_context_and_what_it_costs() -> None:
    trials = [waiting(16, 90.0, 1.0), waiting(8, 85.0, 1.0, context=32768), waiting(1, 30.0, 1.0, context=131072)]
    found = decided(trials, Aim("context", within=0.10))
    assert found.dials.context == 32768
    assert found.given_up[0] == (
        "8 sequences and context 32768 instead of 16 and 8192: 6 % less, context 32768 instead of 8192"
    )
    assert decided(trials, Aim("context", within=0.02)).dials.context == 8192


def test_energy_and_its_absence() -> None:
    trials = [
        Trial(
            replace(BASE, threads=count, threads_batch=count),
            "measured",
            Figures(decode_tok_s=rate, joules_per_token=joules),
        )
        for count, rate, joules in ((8, 70.0, 2.1), (16, 90.0, 2.9))
    ]
    found = decided(trials, Aim("energy"))
    assert found.dials.threads == 8
    assert found.given_up == ("8 threads instead of 16: 22 % less, eight cores free, 2.1 J per token instead of 2.9",)
    unread = [replace(trial, figures=replace(trial.figures, joules_per_token=None)) for trial in trials]
    assert "energy was not measured" in decided(unread, Aim("energy")).given_up[0]
    assert decided(unread, Aim("energy")).dials.threads == 16


def test_loads_and_trials_are_kept() -> None:
    trials = [
        replace(waiting(1, 40.0, 0.2), loaded=True),
        waiting(1, 44.0, 0.2),
        Trial(replace(BASE, sequences=2), "died"),
        replace(waiting(4, 900.0, 0.2), disturbed="make used 2 cores"),
        replace(waiting(2, 10.0, 0.2, mmap=False), loaded=True),
    ]
    found = decided(trials)
    assert (found.loads, found.trials, found.dials) == (2, tuple(trials), BASE)
    assert found.figures.decode_tok_s == 42.0
    assert found.front[0].dials == BASE


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([], "no trial"),
        ([Trial(BASE, "died", detail="killed by signal 9")], "killed by signal 9"),
        ([replace(waiting(1, 1.0, 1.0), disturbed="make used 2 cores")], "make used 2 cores"),
    ],
)
def test_nothing_to_decide_by(trials: list[Trial], words: str) -> None:
    with pytest.raises(TokenmillError, match=words) as caught:
        decided(trials)
    assert caught.value.hint


measured = st.builds(
    lambda threads, sequences, context, rate, first, joules: Trial(
        TrialSettings(threads, threads, sequences, 512, context),
        "measured",
        Figures(decode_tok_s=rate, first_token_s=first, joules_per_token=joules),
    ),
    st.integers(1, 16),
    st.sampled_from((1, 8)),
    st.sampled_from((4096, 8192)),
    st.floats(1, 100),
    st.none() | st.floats(0.1, 10),
    st.none() | st.floats(0.1, 10),
)


@settings(max_examples=200)
@given(
    trials=st.lists(measured, min_size=1, max_size=12),
    kind=st.sampled_from(("throughput", "cores", "context", "energy")),
)
def test_nothing_on_the_front_is_beaten_by_all(trials: list[Trial], kind: str) -> None:
    """Without noise, the front is never empty and has the choice, and no other member is dominated."""
    aim = Aim(kind)  # type: ignore[arg-type]
    found = decided(trials, aim, noise=0.0)
    yard, all_of_them = yardstick(aim, trials), standings(trials)
    scores = {each.dials: score(each, yard) for each in all_of_them}
    assert found.front[0].dials == found.dials
    for trial in found.front[1:]:
        assert not any(beats(other, scores[trial.dials], 0.0) for other in scores.values())
    left_out = {each.dials for each in all_of_them} - {trial.dials for trial in found.front}
    for dials in left_out:
        assert any(beats(other, scores[dials], 0.0) for other in scores.values())


def test_front_is_thinned_by_noise() -> None:
    rates = {4: 79.0, 8: 80.0, 12: 81.0, 16: 100.0}
    trials = [
        Trial(replace(BASE, threads=count, threads_batch=count), "measured", Figures(decode_tok_s=rate))
        for count, rate in rates.items()
    ]
    assert [trial.dials.threads for trial in decided(trials, noise=0.0).front] == [16, 12, 8, 4]
    found = standings(trials)
    chosen = next(each for each in found if each.dials.threads == 4)
    assert [each.dials.threads for each in front(found, yardstick(Aim(), trials), 0.03, chosen)] == [4, 16]


def test_recorded_surface_in_words() -> None:
    space, surface = RECORDED["experts on cpu"]
    found = decided([tried(surface, dials, Random(0)) for dials in space.combinations()], host=True)
    assert (found.dials.threads, found.dials.sequences) == (14, 16)
    assert found.knee.startswith("beyond 24 sequences tok/s falls from")
    assert all(len(sentence) < 160 for sentence in (*found.given_up, found.knee))
