"""The display and the summary of a run."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tokenmill.api.batch_run import counts_text
from tokenmill.api.summary import Summary
from tokenmill.cli.views.run import document, summary
from tokenmill.cli.views.run_progress import RecentSpeeds, drawn, line
from tokenmill.jobs.models import Batch, BatchTotals, Counts, Failure
from tokenmill.jobs.scheduler.estimates import MeasuredRates, RemainingWork
from tokenmill.jobs.worker.answer_checks import AnswerChecks
from tokenmill.jobs.worker.progress import Failed, MinimumTokens, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import Miss, Misses
from tokenmill.jobs.worker.slot_use import SlotUse
from tokenmill.jobs.worker.throughput import RunTokens

NOW = Snapshot(
    elapsed_s=100.0,
    counts=Counts(pending=700, running=8, done=480, failed=12),
    tokens=RunTokens(90_000, 80_000, 4_000),
    prompt_tokens_live=10_500,
    busy=8,
    width=8,
    retrying=2,
    eta_s=147.0,
    engine=None,
    engine_detail=None,
    failed=Failed(
        17, Failure("too_long", "the prompt has 9000 tokens\nand the context 8192: 809 too many" * 3), again=False
    ),
    output=None,
)
BATCH = Batch(
    1,
    "batch_0123456789abcdef",
    "notes.jsonl",
    "m",
    "/tmp/out.jsonl",
    None,
    True,
    0,
    None,
    {},
    0.0,
    1.0,
    None,
    36,
    Counts(done=34, failed=1, quarantined=1),
    BatchTotals(),
)


def printed(*parts: object) -> str:
    console = Console(width=80, no_color=True, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def report(**changes: object) -> RunReport:
    whole = RunReport(
        "finished",
        41.0,
        40.0,
        BATCH.counts,
        34,
        RunTokens(33_840, 31_200, 1_780),
        MeasuredRates(1_080.0),
        7.6,
        Misses(),
        MinimumTokens(2_610, exact=True),
        0,
        (),
        1_080.0,
        8,
        {"stop": 32, "length": 2},
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def ended(report: RunReport | None, load_s: float | None = None) -> Summary:
    codes = {"too_long": 1, "engine_died": 1}
    return Summary(BATCH, Path("store"), 44.0, report, load_s, codes)


def test_the_display_has_a_line_for_each_thing_and_none_too_long() -> None:
    shown = printed(drawn(NOW, (110.0, 41.5), 0.0)).splitlines()
    assert all(len(text) <= 80 for text in shown)
    text = "\n".join(shown)
    assert "480 of 1,200, 12 failed, 2 waiting" in text
    assert "110 (average 105), decode 42 (average 40)" in text
    assert "90,000 tokens, 89 %" in text
    assert "left     about 2 min, done at" in text
    assert "8 of 8 busy" in text
    assert "line 17: the prompt has 9000 tokens and the context" in text
    assert len(shown) == 6


def test_the_summary_says_what_kept_slots_free() -> None:
    use = SlotUse(100, 450, {"slots": 40, "jobs": 50, "cells": 9, "prefix": 1})
    rows = [text.rstrip().split(maxsplit=1) for text in printed(*summary(ended(report(slot_use=use)))).splitlines()]
    assert (
        dict(row for row in rows if len(row) == 2)["slots"]
        == "4.5 per step; 50 % of steps lacked jobs, 9.0 % lacked KV cells"
    )
    full = SlotUse(100, 800, {"slots": 95, "jobs": 5})
    for one in (full, None):
        assert "lacked" not in printed(*summary(ended(report(slot_use=one))))
    found = document(ended(report(slot_use=use)))
    assert (found["slots_busy"], found["slots_limited_by"]["jobs"]) == (4.5, 50)


def test_trouble_is_shown_while_there_is_any() -> None:
    trouble = replace(NOW, engine="is restarting", output="out.jsonl was removed", eta_s=None)
    text = printed(drawn(trouble, None, 0.0))
    assert "engine" in text
    assert "is restarting" in text
    assert "out.jsonl was removed" in text
    assert "left" not in text


def test_a_log_line_has_the_same_figures() -> None:
    noon_s = time.mktime((2026, 11, 19, 12, 0, 0, 0, 0, -1))
    assert line(NOW, (110.0, 41.5), noon_s) == (
        "480 of 1,200 jobs, 12 failed; prefill 110 tok/s, decode 42 tok/s; 89 % of prompt tokens from cache; "
        "8 of 8 slots busy; about 2 min left, done at 12:02"
    )
    forecast = replace(NOW, left=RemainingWork(12_345.6, 678.9), eta_s=2 * 86_400.0, forecast=True)
    assert line(forecast, None, noon_s).endswith(
        "12,346 prompt and 679 answer tokens, about 48.0 h left, done at 2026-11-21 12:00 (forecast)"
    )


def test_the_bar_shows_the_share_of_tokens() -> None:
    for share, cells in ((0.0, 0), (0.5, 12), (1.0, 24)):
        assert printed(drawn(replace(NOW, share=share), None, 0.0)).count("━") == cells
    assert printed(drawn(NOW, None, 0.0)).count("━") == 24 * 492 // 1200  # of jobs


def test_now_is_the_last_seconds() -> None:
    speeds = RecentSpeeds()
    assert speeds.now() is None
    for second in range(100):
        tokens = RunTokens(0, 0, generated=10 * second if second < 80 else 800 + 50 * (second - 80))
        speeds.add(replace(NOW, elapsed_s=float(second), prompt_tokens_live=3 * second, tokens=tokens))
    found = speeds.now()
    assert found is not None
    assert found == pytest.approx((3.0, 50.0), rel=0.05)


def test_a_summary_has_the_counts_the_speeds_and_the_share_from_cache() -> None:
    text = printed(*summary(ended(report(), load_s=3.0)))
    assert all(len(row) <= 80 for row in text.splitlines())
    for words in (
        "34 of 36 answered (32 stop, 2 cut at max_tokens)",
        "1 failed, 1 quarantined",
        "41 s   50 jobs/min   44 tok/s   7.6 of 8 slots busy",
        "33,840 tokens, 92 % from cache (1.1 % above the minimum), saves 29 s",
        "tokenmill results batch_0123456789abcdef --failed",
    ):
        assert words in text
    assert "cache miss" not in text


def test_a_summary_of_nothing_to_do_is_short() -> None:
    text = printed(*summary(replace(ended(None), batch=replace(BATCH, counts=Counts(done=36)), failed_by_code={})))
    assert "36 of 36 answered" in text
    assert "prompts" not in text
    assert len(text.splitlines()) == 2


def test_cache_misses_are_explained() -> None:
    misses = Misses()
    misses.add(Miss(3, "evicted", "the engine dropped 900 tokens in between to make room", 900, 0))
    text = printed(*summary(ended(report(misses=misses, minimum=MinimumTokens(2_610, exact=False)))))
    assert "cache miss: evicted: 900 prompt tokens computed again in 1 job" in text
    assert "(about 1.1 % above" in text


def test_a_resumed_run_counts_its_own_answers_and_a_warm_engine_has_no_overhead() -> None:
    resumed = report(answers=10, finish_reasons={"stop": 10}, minimum=MinimumTokens(26_100, exact=True), slots=None)
    text = printed(*summary(ended(resumed)))
    assert "34 of 36 answered, 10 in this run (10 stop)" in text
    assert "7.6 slots busy" in text
    assert "above" not in text


def test_a_summary_says_what_would_help_and_counts_in_words() -> None:
    whole = ended(report(crashes=1), load_s=3.0)
    text = " ".join(printed(*summary(whole)).split())
    assert "loaded in 3.0 s, restarted 1 time" in text
    assert "1 too long: tokenmill retry batch_0123456789abcdef --failed, " in text
    assert "the other one: tokenmill retry batch_0123456789abcdef --failed, then the same command" in text
    alone = replace(whole, batch=replace(BATCH, counts=Counts(failed=1)), failed_by_code={"refused": 1})
    text = " ".join(printed(*summary(alone)).split())
    assert "0 of 1 answered" in text
    assert "1 line cannot be run" in text
    assert "retry" not in text


def test_totals_say_why_lines_have_no_answer() -> None:
    found = document(ended(report()))
    assert found["failed_by_code"] == {"too_long": 1, "engine_died": 1}
    assert found["end"] == "finished"
    assert found["finish_reasons"] == {"stop": 32, "length": 2}
    stopped = replace(ended(None), batch=replace(BATCH, counts=Counts(pending=3)))
    assert document(stopped)["end"] == "stopped"


def test_saved_time_is_not_guessed_without_a_measured_prefill_rate() -> None:
    text = printed(*summary(ended(report(long_prefill_tok_s=None))))
    assert "92 %" in text
    assert "saves" not in text


def test_one_of_a_thing_is_one() -> None:
    now = replace(NOW, counts=Counts(pending=1), busy=1, width=1, eta_s=None)
    assert line(now, None, 0.0).startswith("0 of 1 job;")
    assert line(now, None, 0.0).endswith("1 of 1 slot busy")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts(pending=1), "1 job"),
        (Counts(pending=3, done=1, failed=1), "5 jobs, 1 already answered, 1 failed"),
        (Counts(pending=3, done=2, quarantined=2), "7 jobs, 2 already answered, 2 failed"),
    ],
)
def test_what_is_there_already_is_said_in_whole_sentences(counts: Counts, said: str) -> None:
    assert counts_text(counts) == said


def test_the_next_command_follows_from_the_result() -> None:
    clean = replace(BATCH, counts=Counts(done=36))
    for whole, command in (
        (replace(ended(report()), batch=BATCH), f"results {BATCH.name} --failed"),
        (replace(ended(report(checks=AnswerChecks(1, 0, 0, 0))), batch=clean), f"results {BATCH.name} --cut"),
        (replace(ended(report()), batch=clean, untuned="kimi.gguf"), "tune kimi.gguf"),
    ):
        assert f"next     tokenmill {command}" in printed(*summary(whole))
    assert "next " not in printed(*summary(replace(ended(report()), batch=clean)))


def test_the_forecast_is_shown_next_to_the_time() -> None:
    text = printed(*summary(replace(ended(report()), forecast_s=60.0, seconds=45.0)))
    assert "at most 60 s, took 45 s" in text
    assert document(replace(ended(report()), forecast_s=60.0))["forecast_seconds"] == 60.0
