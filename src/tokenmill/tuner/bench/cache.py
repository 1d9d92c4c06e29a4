"""What the prompt cache is worth: a prompt the first time and again, the same head with a new tail, and its state.

The very first request after a start is measured as well: pages are touched, buffers made and kernels chosen in it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import EngineError
from tokenmill.planner.plan import Plan
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import Row, Runs, Stat, row_of
from tokenmill.tuner.bench.served import Served, Units
from tokenmill.tuner.bench.sweep import Keep, joined

TAIL = 64  # tokens of a job behind a head that many share


@dataclass(frozen=True, slots=True)
class CacheEffect:
    """A prompt that was there already, beside the same one when it was not."""

    prompt_tokens: int
    saved_tokens: int | None  # None: the engine does not say
    lookup_s: Stat  # to the first token of a prompt that is all in the cache
    cold_s: Stat  # to the first token of one that is not
    state_bytes: int | None  # of the prompt's state, as saved; None: the engine saves none
    predicted_state_bytes: int | None  # its cells by the plan

    @property
    def times(self) -> float:
        """How many times sooner the answer begins."""
        return self.cold_s.median / self.lookup_s.median


async def first(rig: Rig, *, prompt: int, tokens: int, keep: Keep) -> Row:
    """The first request of an engine's life; nothing may have been asked of it before."""
    rig.need(prompt + tokens, f"a prompt of {prompt:,}")
    rig.tell("the first request")
    served = await rig.ask(await rig.prose.take(prompt), tokens)
    return keep(row_of("first", Runs((served,))))


async def cache(
    rig: Rig, *, prompt: int, tokens: int, keep: Keep, plan: Plan | None
) -> tuple[tuple[Row, ...], CacheEffect | None]:
    """A prompt cold, the same again, and its head with a new tail; None where nothing was reused."""
    rig.need(prompt + TAIL + tokens, f"a prompt of {prompt:,} with a tail")
    units: Units = ()

    async def cold() -> Served:
        nonlocal units
        units = await rig.prose.take(prompt)
        return await rig.ask(units, tokens)

    async def again() -> Served:
        return await rig.ask(units, tokens)

    async def tail() -> Served:
        return await rig.ask(joined(units, await rig.prose.take(TAIL)), tokens)

    rig.tell("a prompt the first time")
    one = keep(row_of("cold", await rig.runs(cold)))
    rig.tell("the same prompt again")
    two = keep(row_of("again", await rig.runs(again)))
    rig.tell("the same head, a new tail")
    three = keep(row_of("tail", await rig.runs(tail)))
    return (one, two, three), await _effect(rig, one, two, units, plan)


async def _effect(rig: Rig, cold: Row, again: Row, units: Units, plan: Plan | None) -> CacheEffect | None:
    if again.n_kv == 0 or again.t_pp_s is None or cold.t_pp_s is None:
        return None
    return CacheEffect(
        again.prompt_tokens,
        again.n_kv,
        again.t_pp_s,
        cold.t_pp_s,
        await _saved_bytes(rig, units),
        None if plan is None else state_bytes(plan, again.prompt_tokens),
    )


def state_bytes(plan: Plan, tokens: int) -> int:
    """Cells of so many tokens, by the plan."""
    kv = sum(row.bytes for row in plan.ledger.full_context if row.item == "kv")
    return round(kv * tokens / plan.settings.cells)


async def _saved_bytes(rig: Rig, units: Units) -> int | None:
    can = rig.engine.capabilities
    if not can.saves_heads or can.saves_slots:
        return None
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        path = Path(folder) / "head"
        try:
            await rig.engine.save_prefix(rig.prose.prompt(units), path)
        except EngineError:
            return None  # no room for the file, say: the size is a detail
        return path.stat().st_size
