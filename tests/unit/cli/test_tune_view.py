"""The announcement, progress and result of a tuning run at 80 columns."""

from dataclasses import replace

from rich.console import Console

from support.plans import placed, settings
from support.run_models import model
from tokenmill.cli.views.tune import outcome_shown
from tokenmill.tuner.describe import announced, figures_words, progress_line, settings_words
from tokenmill.tuner.point import Aim, Figures, OperatingPoint, PointScope, Trial, TrialSettings
from tokenmill.tuner.search.space import Space
from tokenmill.tuner.trial_run import TrialStep

DIALS = TrialSettings(13, 16, 12, 512, 16384, "q8_0", "q8_0")
FIGURES = Figures(91.2, 1234.5, 80.4, 1.25, 3.21, 20 << 30, 10 << 30)
TRIAL = Trial(DIALS, "measured", FIGURES, 6.0)
SPACE = Space(
    threads=tuple(range(1, 17)),
    sequences=(1, 2, 4, 8),
    ubatch=(128, 512),
    context=(4096,),
    cache_types=(("f16", "f16"), ("q8_0", "q8_0")),
    flash_attention=(True, False),
    mmap=(True, False),
    reasons=("mmap False: 12 tok/s forecast instead of 10",),
)


class SearchState:
    """Eighteen remaining trials and one more load."""

    def remaining(self) -> int:
        return 18

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        return (DIALS,)


def lines(*, kind: str = "native", known: tuple[Trial, ...] = (), aim: Aim | None = None) -> list[str]:
    plan = placed(model("llama-3.3-70b:Q4_K_M"), settings())
    told = announced(plan, aim or Aim(), SPACE, SearchState(), known, 5.0, kind=kind)
    return "\n".join(told).splitlines()


def test_what_will_be_done_is_said_beforehand() -> None:
    told = lines()
    assert all(len(line) <= 80 for line in told)
    text = " ".join(" ".join(told).split())
    assert "512 shared + 64 own tokens, 64 " in text
    assert "sequences 1-8" not in text, "four values that are no range are named"
    assert "sequences 1/2/4/8" in text
    assert "threads 1-16" in text
    assert "cache types f16/q8_0, flash attention on/off, mmap on/off" in text
    assert "mmap False: 12 tok/s forecast instead of 10" in text
    assert "about 18 trials, 2 loads, 3 min" in text


def test_own_jobs_are_not_told_as_drawn_ones() -> None:
    plan = placed(model("llama-3.3-70b:Q4_K_M"), settings())
    text = " ".join(announced(plan, Aim(), SPACE, SearchState(), (), 5.0, kind="native", jobs=3))
    assert "3 jobs" in " ".join(text.split())
    assert "shared" not in text


def test_old_trials_and_starts_of_servers_are_counted() -> None:
    text = " ".join(lines(known=(replace(TRIAL, seconds=30.0), Trial(DIALS, "died"))))
    assert "2 earlier trials" in text
    assert "9 min" in text, "trials take as long as those before did"
    assert "18 starts of vllm" in " ".join(lines(kind="vllm"))
    told = " ".join(" ".join(lines(aim=Aim("latency", first_token_s=0.5))).split())
    assert "500 ms" in told
    assert "within 10%" in " ".join(" ".join(lines(aim=Aim("cores"))).split())


def test_each_trial_is_a_line_or_two() -> None:
    best = replace(TRIAL, dials=replace(DIALS, sequences=16))
    line = progress_line(TrialStep(3, TRIAL, best, 4))
    assert line.startswith("  3  12 seqs, 13 threads/16, ubatch 512, q8_0: 80.4 tok/s, first token 1.2 s")
    assert "(best 80.4)" in line
    assert "best" not in progress_line(TrialStep(3, TRIAL, TRIAL, 4))
    disturbed = progress_line(TrialStep(4, replace(TRIAL, disturbed="python3 (pid 7) used 0.8 cores"), None, 4))
    assert "discarded: python3 (pid 7)" in " ".join(disturbed.split())
    died = progress_line(TrialStep(5, Trial(DIALS, "out of memory", detail="word " * 100), None, 4))
    assert "out of memory, word" in died
    assert died.endswith("...")
    for text in (line, disturbed, died):
        assert all(len(part) <= 80 for part in text.splitlines())


def test_dials_and_figures_in_words() -> None:
    plain = TrialSettings(1, 1, 1, 512, 4096, flash_attention=False, mmap=False, offload_min_batch=128)
    assert settings_words(plain) == "1 seq, 1 thread, ubatch 512, no fa, no mmap, offload from 128"
    assert settings_words(DIALS, whole=True) == (
        "12 sequences, 13 threads, 16 for prefill, micro-batch 512, context 16,384, q8_0 cache"
    )
    assert figures_words(Figures(decode_tok_s=5.0)) == "5 tok/s decoding"
    assert figures_words(Figures()) == ""
    whole = figures_words(FIGURES, whole=True)
    assert "1,234 tok/s prefill" in whole
    assert "20.0 GiB host memory" in whole
    assert "3.21 J" in whole


def shown(point: OperatingPoint) -> str:
    console = Console(width=80, no_color=True, highlight=False, markup=False)
    with console.capture() as capture:
        for part in outcome_shown(point, "nothing untried can win"):
            console.print(part)
    return capture.get()


def test_the_outcome_names_the_point_its_price_and_the_front() -> None:
    others = [replace(TRIAL, dials=replace(DIALS, sequences=count)) for count in (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    point = OperatingPoint(
        PointScope("mill", "a", "Small", "b", "native", "1"),
        Aim(),
        DIALS,
        FIGURES,
        0.02,
        ("13 threads instead of 16",),
        "beyond 12 it falls",
        (TRIAL, *others),
        (TRIAL, *others),
        1,
        90.0,
        "2026-11-15T00:00:00+00:00",
    )
    text = shown(point)
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in (
        "13 threads instead of 16",
        "beyond 12 it falls",
        "10 trials, 1 load, 90 s; nothing untried can win",
        "2.0%",
        "J/token",
        "and 2 more",
    ):
        assert words in text
    assert [line for line in text.splitlines() if line.rstrip().endswith("<")], "the point is marked"
    alone = replace(point, front=(TRIAL,), given_up=(), knee="")
    assert "Pareto" not in shown(alone)
    assert "trade-off  none" in shown(alone)
    assert "knee" not in shown(alone)
