"""Speed by depth of the context, by threads and by sequences.

`sweep` grows one prompt, as llama-sweep-bench does, but through the serving interface:

    row          cache before (N_KV)   computed (PP)   generated after both (TG)
    1            0                     step            tg
    2            step                  step            tg
    3            2 x step              step            tg

A point is repeated with another continuation of the same prefix, so that only the prefix is cached. `by_threads` needs
an engine that changes its threads without a reload. `by_sequences` uses at most the slots that a server was started
with.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from tokenmill.errors import UsageError
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import BenchRow, row_of, stat
from tokenmill.tuner.bench.served import Arrivals, Served, Units

Keep = Callable[[BenchRow], BenchRow]
"""Called with each row as it is measured; returns the row, with a forecast if there is one."""


def steps(depth: int, step: int) -> tuple[tuple[int, int], ...]:
    """Pairs of cached and new tokens of each row; the last may be shorter."""
    return tuple((before, min(step, depth - before)) for before in range(0, depth, step))


async def sweep(rig: Rig, *, depth: int, step: int, tokens: int, keep: Keep) -> tuple[BenchRow, ...]:
    """Measure rows up to a depth, in steps; `tokens` are generated at each."""
    if depth < 1 or step < 1 or tokens < 2:
        raise UsageError("a sweep needs a depth and a step of at least 1, and at least 2 generated tokens")
    await rig.prose.learn()
    rig.need(depth + tokens, f"a sweep to {depth:,}")
    prefix: Units = ()
    rows = []
    for before, size in steps(depth, step):
        rig.tell(f"sweep: depth {before + size:,} of {depth:,}")
        last: Units = ()

        async def once(prefix: Units = prefix, size: int = size) -> Served:
            nonlocal last
            last = await rig.prose.take(size)
            return await rig.ask(joined(prefix, last), tokens)

        rows.append(keep(row_of("sweep", await rig.runs(once))))
        prefix = joined(prefix, last)
    return tuple(rows)


def joined(prefix: Units, rest: Units) -> Units:
    """Two texts of the same kind, tokens or words, as one."""
    return (*prefix, *rest)


MAX_POINTS = 8
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads to measure: all of them with few cores, else denser towards the upper end."""
    if cores <= MAX_POINTS:
        return tuple(range(1, cores + 1))
    upper = {cores, cores - 1, cores - 2, cores - 3}
    return tuple(sorted(upper | {max(1, round(cores * share)) for share in (0.125, 0.25, 0.5, 0.75)}))


def sequence_counts(slots: int) -> tuple[int, ...]:
    """Numbers of sequences to measure on an engine with `slots` slots."""
    return tuple(sorted({*(count for count in SEQUENCES if count < slots), slots}))


async def by_threads(
    rig: Rig, counts: Sequence[int], *, prompt: int, tokens: int, keep: Keep
) -> tuple[tuple[BenchRow, ...], str | None]:
    """A row for each number of threads, used for decode and prefill; or no rows and the reason."""
    engine = rig.engine
    before = rig.engine.runtime
    if not engine.capabilities.changes_threads or before is None:
        return (), f"by threads: {rig.engine.identity.build} cannot change its threads without a reload"
    rig.need(prompt + tokens, f"a prompt of {prompt:,}")
    rows = []
    try:
        for count in counts:
            rig.tell(f"threads: {count}")
            await engine.set_threads(count, count)

            async def once() -> Served:
                return await rig.ask(await rig.prose.take(prompt), tokens)

            row = row_of("threads", await rig.runs(once))
            rows.append(keep(replace(row, threads=count, threads_batch=count)))
    finally:
        await engine.set_threads(before.threads, before.threads_batch)
    return tuple(rows), None


async def by_sequences(
    rig: Rig, counts: Sequence[int] | None, *, prompt: int, tokens: int, keep: Keep
) -> tuple[tuple[BenchRow, ...], str | None]:
    """A row for each number of concurrent sequences; or no rows and the reason."""
    engine = rig.engine
    slots = engine.identity.slots
    max_slots = engine.capabilities.max_slots
    most = slots if max_slots is None else max_slots
    if counts is None:
        if slots is None:
            return (), f"by sequences: {rig.engine.identity.build} does not report its number of slots"
        counts = sequence_counts(slots)
    if most is not None and max(counts) > most:
        raise UsageError(
            f"the engine has {most} slots (got {max(counts)})",
            hint=f"start one with more: --sequences {max(counts)}",
            code="too_few_slots",
        )
    rig.need(prompt + tokens, f"a prompt of {prompt:,}")
    rows = []
    try:
        for count in counts:
            rig.tell(f"sequences: {count}")
            if max_slots is not None:
                await engine.set_slots(count)
            rows.append(keep(await _together(rig, count, prompt, tokens)))
    finally:
        if max_slots is not None and slots is not None:
            await engine.set_slots(slots)
    note = None
    if max_slots is None and most is not None:
        note = f"by sequences: up to the {most} slots of the running server; more need a restart"
    return tuple(rows), note


async def _together(rig: Rig, count: int, prompt: int, tokens: int) -> BenchRow:
    """Measure prefill and decode one after the other, because prefill would slow down concurrent decoding."""

    async def once() -> tuple[float, list[Served], float | None]:
        texts = [await rig.prose.take(prompt) for _ in range(count)]
        began_s = time.perf_counter()
        firsts = await rig.together(texts, 1)
        prefill_s = time.perf_counter() - began_s
        answers = await rig.together(texts, tokens)
        computed = sum(served.computed_tokens for served, _ in firsts)
        return computed / prefill_s, [served for served, _ in answers], rate(answers)

    found, disturbed, repeated = await rig.repeated(once)
    served = [each for _, answers, _ in found for each in answers]
    depth = round(median(each.prompt_tokens for each in served))
    computed = count * depth
    return BenchRow(
        "sequences",
        computed,
        round(count * median(each.written_tokens for each in served)),
        0,
        depth,
        t_pp_s=stat([computed / speed for speed, _, _ in found]),
        s_pp_tok_s=stat([speed for speed, _, _ in found]),
        t_tg_s=stat([each.write_s for each in served]),
        s_tg_tok_s=stat([speed for _, _, speed in found]),
        total_s=stat([each.total_s for each in served]),
        sequences=count,
        disturbed=disturbed,
        repeated=repeated,
    )


def rate(answers: Sequence[tuple[Served, Arrivals]]) -> float | None:
    """Tokens per second of answers that were decoded concurrently, with cached prompts.

    By the engine's clock if it reports times; the answer that started last is used for all, because the others may
    include the end of a prefill. Else by the tokens that arrived while all of them decoded.
    """
    timed = [(each.engine_decode_s, each.written_tokens - 1) for each, _ in answers if each.engine_decode_s]
    if not timed or len(timed) < len(answers):
        return rate_seen([arrivals for _, arrivals in answers])
    seconds, written = min(timed)
    return len(timed) * written / seconds if written > 0 else None


def rate_seen(streams: Sequence[Arrivals]) -> float | None:
    """Tokens per second of streams while all of them decode: from the last start to the first end.

    The tokens of a piece were generated since the previous piece; only their share in that interval is counted.
    """
    if not streams or any(len(arrivals) < 2 for arrivals in streams):
        return None
    start = max(arrivals[0][0] for arrivals in streams)
    end = min(arrivals[-1][0] for arrivals in streams)
    if end <= start:
        return None
    total = 0.0
    for arrivals in streams:
        for (before, _), (at, count) in pairwise(arrivals):
            inside = min(at, end) - max(before, start)
            if inside > 0 and at > before:
                total += count * inside / (at - before)
    return total / (end - start)
