"""Combines the snapshots and reports of the workers of a pool, and the reports of consecutive runs. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.worker.answer_checks import AnswerChecks
from tokenmill.jobs.worker.progress import Failed, MinimumTokens, RunEnd, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import Misses
from tokenmill.jobs.worker.slot_use import combined
from tokenmill.jobs.worker.throughput import RunTokens


def combined_snapshot(
    working: Mapping[str, Snapshot],
    ended: Mapping[str, tuple[Snapshot | None, str | None]],
    *,
    elapsed_s: float,
    counts: Counts,
    failed: Failed | None,
    output: str | None,
) -> Snapshot:
    """One snapshot of all workers; `ended` has the last snapshot of each ended worker, and why it was lost."""
    every = [*working.values(), *(last for last, _ in ended.values() if last is not None)]
    usable = [now for now in working.values() if now.engine is None]
    down = [f"{name} {now.engine}" for name, now in working.items() if now.engine is not None]
    lost = [f"{name} was lost: {why}" for name, (_, why) in ended.items() if why is not None]
    trouble = "; ".join([*down, *lost]) or (None if every else "no engine has joined yet")
    details = [f"{name} {now.engine_detail}" for name, now in working.items() if now.engine_detail is not None]
    known = next((now for now in usable if now.left is not None), None)  # every worker knows the whole batch
    return Snapshot(
        elapsed_s,
        counts,
        _tokens(now.tokens for now in every),
        sum(now.prompt_tokens_live for now in every),
        busy=sum(now.busy for now in working.values()),
        width=sum(now.width for now in working.values()),
        retrying=sum(now.retrying for now in working.values()),
        eta_s=_eta_s(usable),
        engine=None if usable else trouble,
        engine_detail="; ".join([*details, *down, *lost]) or None if usable else None,
        failed=failed,
        output=output,
        left=None if known is None else known.left,
        share=None if known is None else known.share,
        forecast=bool(usable) and all(now.forecast for now in usable),
    )


def combined_report(
    every: Sequence[RunReport], *, end: RunEnd, seconds: float, counts: Counts, notes: Sequence[str] = ()
) -> RunReport:
    """One report of all workers. Minimums are summed, so a prefix that two workers computed counts twice."""
    misses = Misses()
    for each in every:
        misses.include(each.misses)
    busy_s = max((each.busy_s for each in every), default=0.0)
    busy_slots = sum(each.busy_slots * each.busy_s for each in every) / busy_s if busy_s else 0.0
    minimums = [each.minimum for each in every if each.minimum is not None]
    complete = len(minimums) == sum(each.answers > 0 for each in every)
    minimum = (
        MinimumTokens(sum(one.tokens for one in minimums), exact=all(one.exact for one in minimums))
        if minimums and complete
        else None
    )
    prefill_rates = [each.long_prefill_tok_s for each in every if each.long_prefill_tok_s is not None]
    slots = [each.slots for each in every if each.slots is not None]
    slot_uses = [each.slot_use for each in every if each.slot_use is not None]
    finish_reasons = sum((Counter(each.finish_reasons) for each in every), Counter[str]())
    return RunReport(
        end,
        seconds,
        busy_s,
        counts,
        sum(each.answers for each in every),
        _tokens(each.tokens for each in every),
        _rates([each.rates for each in every]),
        busy_slots,
        misses,
        minimum,
        sum(each.crashes for each in every),
        tuple(dict.fromkeys([*notes, *(note for each in every for note in each.notes)])),
        sum(prefill_rates) if prefill_rates else None,
        sum(slots) if slots else None,
        dict(finish_reasons.most_common()),
        combined(slot_uses) if slot_uses else None,
        sum((each.checks for each in every), AnswerChecks()),
    )


def consecutive_report(every: Sequence[RunReport]) -> RunReport:
    """One report of the parts of a run; rates and slots are those of the last part that computed something."""
    last = every[-1]
    measured = next((each for each in reversed(every) if each.answers), last)
    busy_s = sum(each.busy_s for each in every)
    together = combined_report(every, end=last.end, seconds=sum(each.seconds for each in every), counts=last.counts)
    return replace(
        together,
        busy_s=busy_s,
        busy_slots=sum(each.busy_slots * each.busy_s for each in every) / busy_s if busy_s else 0.0,
        rates=measured.rates,
        long_prefill_tok_s=measured.long_prefill_tok_s,
        slots=measured.slots,
    )


def _tokens(every: Iterable[RunTokens]) -> RunTokens:
    sums = [(each.prompt, each.cached, each.generated) for each in every]
    return RunTokens(*(sum(column) for column in zip(*sums, strict=True))) if sums else RunTokens()


def _rates(every: Sequence[MeasuredRates]) -> MeasuredRates:
    """The sum of the known rates."""
    prefill = [each.prefill_tok_s for each in every if each.prefill_tok_s is not None]
    decode = [each.decode_tok_s[-1][1] for each in every if each.decode_tok_s]
    return MeasuredRates(sum(prefill) if prefill else None, ((1, sum(decode)),) if decode else ())


def _eta_s(usable: Sequence[Snapshot]) -> float | None:
    """Combined remaining time, given that each worker's estimate assumes that it does all remaining work alone."""
    alone = [now.eta_s for now in usable if now.eta_s is not None]
    if not alone:
        return None
    return 0.0 if min(alone) <= 0 else 1 / sum(1 / eta_s for eta_s in alone)
