"""Measures the prompt cache: a new prompt, the same prompt again, its prefix with a new end, and the size of its state.

Also measures the first request after a start, which touches pages, allocates buffers and chooses kernels.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import EngineError
from tokenmill.planner.plan import Plan
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import BenchRow, Runs, Stat, row_of
from tokenmill.tuner.bench.served import Served, Units
from tokenmill.tuner.bench.sweep import Keep, joined

TAIL = 64  # tokens after the shared prefix


@dataclass(frozen=True, slots=True)
class CacheEffect:
    """A cached prompt compared with an uncached one."""

    prompt_tokens: int
    saved_tokens: int | None  # None: the engine does not report it
    lookup_s: Stat  # to the first token of a fully cached prompt
    cold_s: Stat  # to the first token of a prompt that is not cached
    state_bytes: int | None  # of the prompt's state in a file; None: the engine cannot save it
    predicted_state_bytes: int | None  # of its KV cells, according to the plan

    @property
    def times(self) -> float:
        """Speedup of the first token."""
        return self.cold_s.median / self.lookup_s.median


async def first(rig: Rig, *, prompt: int, tokens: int, keep: Keep) -> BenchRow:
    """Measure the first request of an engine, which must have had none before."""
    rig.need(prompt + tokens, f"a prompt of {prompt:,}")
    rig.tell("first request")
    served = await rig.ask(await rig.prose.take(prompt), tokens)
    return keep(row_of("first", Runs((served,))))


async def cache(
    rig: Rig, *, prompt: int, tokens: int, keep: Keep, plan: Plan | None
) -> tuple[tuple[BenchRow, ...], CacheEffect | None]:
    """Measure a new prompt, the same again, and its prefix with a new end; the effect is None if nothing was reused."""
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

    rig.tell("new prompt")
    one = keep(row_of("cold", await rig.runs(cold)))
    rig.tell("same prompt again")
    two = keep(row_of("again", await rig.runs(again)))
    rig.tell("same prefix, new tail")
    three = keep(row_of("tail", await rig.runs(tail)))
    return (one, two, three), await _effect(rig, one, two, units, plan)


async def _effect(rig: Rig, cold: BenchRow, again: BenchRow, units: Units, plan: Plan | None) -> CacheEffect | None:
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
    """Bytes of KV cells for `tokens`, according to the plan."""
    kv = sum(row.bytes for row in plan.ledger.full_context if row.item == "kv")
    return round(kv * tokens / plan.settings.cells)


async def _saved_bytes(rig: Rig, units: Units) -> int | None:
    can = rig.engine.capabilities
    if not can.saves_prefixes or can.saves_slots:
        return None
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        path = Path(folder) / "prefix"
        try:
            await rig.engine.save_prefix(rig.prose.prompt(units), path)
        except EngineError:
            return None  # such as a full disk; the size is not important
        return path.stat().st_size
