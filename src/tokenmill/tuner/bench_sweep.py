"""Prefill and decode by the depth of the context: one prompt that grows, as llama-sweep-bench has it, but served.

    row          cache before (N_KV)   computed (PP)   written behind both (TG)
    1            0                     step            tg
    2            step                  step            tg
    3            2 x step              step            tg

A point is repeated with another continuation of the same head, so that the head is in the cache and the rest is not.
"""

from collections.abc import Callable

from tokenmill.errors import UsageError
from tokenmill.tuner.bench_rig import Rig
from tokenmill.tuner.bench_rows import Row, row_of
from tokenmill.tuner.bench_served import Served, Units

Keep = Callable[[Row], Row]
"""Given each row as it is measured; gives it back, perhaps with what was predicted."""


def steps(depth: int, step: int) -> tuple[tuple[int, int], ...]:
    """(tokens before, tokens new) of each row; the last is shorter where the depth is no multiple."""
    return tuple((before, min(step, depth - before)) for before in range(0, depth, step))


async def sweep(rig: Rig, *, depth: int, step: int, tokens: int, keep: Keep) -> tuple[Row, ...]:
    """Rows up to a depth, in steps; `tokens` are written at each."""
    if depth < 1 or step < 1 or tokens < 2:
        raise UsageError("a sweep needs a depth and a step of at least 1, and 2 tokens to write")
    await rig.prose.learn()
    rig.need(depth + tokens, f"a sweep to {depth:,}")
    head: Units = ()
    rows = []
    for before, size in steps(depth, step):
        rig.tell(f"sweep: {before + size:,} of {depth:,} tokens deep")
        last: Units = ()

        async def once(head: Units = head, size: int = size) -> Served:
            nonlocal last
            last = await rig.prose.take(size)
            return await rig.ask(joined(head, last), tokens)

        rows.append(keep(row_of("sweep", await rig.runs(once))))
        head = joined(head, last)
    return tuple(rows)


def joined(head: Units, rest: Units) -> Units:
    """One text after another; both are tokens, or both words."""
    return (*head, *rest)
