"""The snapshots and reports of several workers combined into one."""

import pytest

from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.worker.pool_summary import combined_report, combined_snapshot
from tokenmill.jobs.worker.progress import MinimumTokens, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import Miss, Misses
from tokenmill.jobs.worker.throughput import RunTokens

COUNTS = Counts(pending=10, done=5)
NO_RATES = MeasuredRates()


def now(
    generated: int = 8, *, eta_s: float | None = None, engine: str | None = None, says: str | None = None
) -> Snapshot:
    tokens = RunTokens(100, 40, generated)
    return Snapshot(9.0, Counts(), tokens, 70, 3, 4, 1, eta_s, engine, says, None, None)


def combined(
    working: dict[str, Snapshot], ended: dict[str, tuple[Snapshot | None, str | None]] | None = None
) -> Snapshot:
    return combined_snapshot(working, ended or {}, elapsed_s=3.0, counts=COUNTS, failed=None, output=None)


def test_snapshots_add_up_and_counts_are_of_the_batches() -> None:
    both = combined({"a": now(), "b": now(16)})
    assert (both.elapsed_s, both.counts) == (3.0, COUNTS)
    assert (both.tokens, both.prompt_tokens_live) == (RunTokens(200, 80, 24), 140)
    assert (both.busy, both.width, both.retrying) == (6, 8, 2)


def test_what_one_did_that_is_gone_still_counts_but_not_its_lanes() -> None:
    one = combined({"a": now()}, {"b": (now(16), "killed"), "c": (now(1), None), "d": (None, "never spoke")})
    assert one.tokens.generated == 25
    assert (one.busy, one.width) == (3, 4)
    assert one.engine is None
    assert one.engine_detail == "b was lost: killed; d was lost: never spoke"


@pytest.mark.parametrize(
    ("etas", "expected"),
    [
        ([None], None),
        ([60.0], 60.0),
        ([60.0, 60.0], 30.0),
        ([60.0, 30.0], 20.0),
        ([60.0, None], 60.0),
        ([0.0, 5.0], 0.0),
    ],
)
def test_together_they_are_as_fast_as_all_of_them(etas: list[float | None], expected: float | None) -> None:
    assert combined({str(at): now(eta_s=eta_s) for at, eta_s in enumerate(etas)}).eta_s == expected


def test_nothing_can_be_used_only_when_no_engine_can() -> None:
    assert combined({}).engine == "no engine has joined yet"
    assert combined({"a": now(engine="died")}).engine == "a died"
    assert combined({"a": now(engine="died")}, {"b": (None, "killed")}).engine == "a died; b was lost: killed"
    some = combined({"a": now(engine="died"), "b": now(says="is silent")})
    assert (some.engine, some.engine_detail) == (None, "b is silent; a died")
    assert combined({}, {"a": (now(), None)}).engine is None


def report(
    answers: int,
    *,
    minimum: MinimumTokens | None,
    rates: MeasuredRates = NO_RATES,
    long_prefill_tok_s: float | None = None,
) -> RunReport:
    misses = Misses()
    misses.add(Miss(1, "evicted", "dropped", 50, 20))
    return RunReport(
        "finished",
        9.0,
        4.0,
        Counts(),
        answers,
        RunTokens(10, 4, 2),
        rates,
        2.0,
        misses,
        minimum,
        1,
        ("a note",),
        long_prefill_tok_s,
        4,
        {"stop": answers},
    )


def summed(*every: RunReport) -> RunReport:
    return combined_report(every, end="finished", seconds=5.0, counts=COUNTS, notes=["first"])


def test_reports_add_up() -> None:
    rates = MeasuredRates(100.0, ((1, 20.0),))
    whole = summed(
        report(2, minimum=MinimumTokens(7, exact=True), rates=rates),
        report(3, minimum=MinimumTokens(8, exact=False), rates=rates),
    )
    assert (whole.end, whole.seconds, whole.busy_s, whole.counts) == ("finished", 5.0, 4.0, COUNTS)
    assert (whole.answers, whole.tokens, whole.crashes, whole.busy_slots) == (5, RunTokens(20, 8, 4), 2, 4.0)
    assert whole.rates == MeasuredRates(200.0, ((1, 40.0),))
    assert whole.minimum == MinimumTokens(15, exact=False)
    assert whole.notes == ("first", "a note")
    assert (whole.misses.lost_tokens, whole.misses.by_cost()[0].jobs) == (60, 2)
    assert whole.long_prefill_tok_s is None
    assert (whole.slots, whole.finish_reasons) == (8, {"stop": 5})


def test_what_one_does_not_know_all_do_not() -> None:
    known = report(2, minimum=MinimumTokens(7, exact=True), long_prefill_tok_s=10.0)
    assert summed(known, report(2, minimum=None)).minimum is None
    assert summed(known, report(0, minimum=None)).minimum == MinimumTokens(7, exact=True)
    assert summed(known, report(2, minimum=None)).long_prefill_tok_s == 10.0


def test_nobody_did_nothing() -> None:
    whole = summed()
    assert (whole.answers, whole.busy_s, whole.busy_slots, whole.minimum, whole.rates) == (
        0,
        0.0,
        0.0,
        None,
        MeasuredRates(),
    )
    assert (whole.slots, whole.finish_reasons) == (None, {})
