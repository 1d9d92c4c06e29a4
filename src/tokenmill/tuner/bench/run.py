"""Runs a benchmark of an engine, section by section.

With a plan, each row gets the forecast of its point. Rows are recorded in the history as soon as they are measured, so
an interrupted benchmark loses nothing. Prints nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal, get_args

from tokenmill.planner.placement import UNKNOWN, fingerprint
from tokenmill.planner.plan import Plan, Settings
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.tuner.bench.cache import TAIL, CacheEffect, cache, first
from tokenmill.tuner.bench.energy import Energy, energy
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import BenchRow
from tokenmill.tuner.bench.sweep import by_sequences, by_threads, sweep
from tokenmill.tuner.history import Source, SpeedRecord
from tokenmill.tuner.point import Figures, PointScope, TrialSettings

BenchSection = Literal["first", "cache", "sweep", "threads", "sequences", "energy"]
PARTS: tuple[BenchSection, ...] = get_args(BenchSection)
PROMPT = 512  # tokens of a prompt, except in the sweep
SHORT_PROMPT = 128  # tokens of each prompt with several sequences
MIN_PROMPT = 16
LENGTH_TOLERANCE = 0.1  # relative, of the length of a micro-batch


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Sections and sizes of a benchmark."""

    parts: tuple[BenchSection, ...] = PARTS
    depth: int = 2048
    step: int = 512
    tokens: int = 128  # generated at each point
    threads: tuple[int, ...] = ()
    sequences: tuple[int, ...] | None = None  # None: up to the engine's slots
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """All results of one engine."""

    place: PointScope
    when: str  # ISO 8601, UTC
    rows: tuple[BenchRow, ...] = ()
    cache: CacheEffect | None = None
    energy: Energy | None = None
    dials: TrialSettings | None = None  # None: the engine's settings are unknown
    notes: tuple[str, ...] = ()

    def of(self, *what: str) -> tuple[BenchRow, ...]:
        """Rows of the given kinds."""
        return tuple(row for row in self.rows if row.what in what)


@dataclass(slots=True)
class _Rows:
    """Collects rows as they are measured."""

    plan: Plan | None
    place: PointScope
    record: Callable[[SpeedRecord], None] | None
    rows: list[BenchRow] = field(default_factory=list)

    def keep(self, row: BenchRow) -> BenchRow:
        known = row if self.plan is None else predicted(self.plan, row)
        self.rows.append(known)
        if self.record is not None and self.plan is not None and belongs(known):
            where = fingerprint(self.plan.profile, self.plan.placement)
            self.record(speed_of(known, self.place, self.plan.settings, now(), placement=where))
        return known


async def bench(
    rig: Rig,
    order: BenchOptions,
    place: PointScope,
    *,
    plan: Plan | None = None,
    record: Callable[[SpeedRecord], None] | None = None,
) -> Bench:
    """Measure an engine; `record` is called with each speed for the history as soon as it is measured."""
    book = _Rows(plan, place, record)
    when = now()
    notes = [] if plan is None else [note for note in plan.forecast.notes if note.startswith("no forecast")]
    effect = None
    used = None
    await rig.prose.learn()
    prompt = prompt_tokens(rig, order.tokens + TAIL)
    if "first" in order.parts:
        await first(rig, prompt=prompt, tokens=order.tokens, keep=book.keep)
    else:
        rig.tell("warm-up")
        await rig.ask(await rig.prose.take(MIN_PROMPT), 2)
    if "cache" in order.parts or "first" in order.parts:
        _, effect = await cache(rig, prompt=prompt, tokens=order.tokens, keep=book.keep, plan=plan)
        if effect is None:
            notes.append("the prompt cache had no effect: a repeated prompt was computed again")
    if "sweep" in order.parts:
        await sweep(rig, depth=order.depth, step=order.step, tokens=order.tokens, keep=book.keep)
    if "threads" in order.parts:
        _, note = await by_threads(rig, order.threads, prompt=prompt, tokens=order.tokens, keep=book.keep)
        notes += [note] if note else []
    if "sequences" in order.parts:
        _, note = await by_sequences(
            rig, order.sequences, prompt=min(SHORT_PROMPT, prompt), tokens=order.tokens, keep=book.keep
        )
        notes += [note] if note else []
    if "energy" in order.parts:
        used = await energy(rig, prompt=prompt, tokens=order.tokens, watts=order.watts)
    left_out = sum(row.disturbed is not None for row in book.rows)
    if left_out and record is not None and plan is not None:
        notes.append(f"{left_out} disturbed point{'s are' if left_out > 1 else ' is'} not recorded in the history")
    return Bench(
        place,
        when,
        tuple(book.rows),
        effect,
        used,
        None if plan is None else trial_settings_of(plan.settings),
        tuple(notes),
    )


def belongs(row: BenchRow) -> bool:
    """Whether to record a row in the history, which is for the steady state on an idle machine."""
    return row.what != "first" and row.disturbed is None


def prompt_tokens(rig: Rig, others: int) -> int:
    """Tokens of a prompt: `PROMPT`, or fewer if the context is too short for them and `others` more tokens."""
    return PROMPT if rig.room is None else max(MIN_PROMPT, min(PROMPT, rig.room - others))


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def predicted(plan: Plan, row: BenchRow) -> BenchRow:
    """The row with the forecast of the same point."""
    settings = plan.settings
    if row.threads is not None:
        settings = replace(settings, threads=row.threads, threads_batch=row.threads_batch or row.threads)
    machine = plan.machine
    profile = plan.profile
    placement = plan.placement
    known = plan.calibration
    write = decode_speed(
        machine, profile, settings, placement, depth=row.depth, sequences=row.sequences, calibration=known
    )
    read = None
    if row.s_pp_tok_s is not None and row.sequences == 1:
        read = prefill_speed(
            machine,
            profile,
            settings,
            placement,
            depth=row.n_kv or 0,
            prompt=row.pp,
            calibration=known,
        )
    return replace(
        row,
        predicted_pp_tok_s=read.tok_s if read else None,
        predicted_tg_tok_s=write.tok_s if write else None,
    )


def trial_settings_of(settings: Settings) -> TrialSettings:
    """A plan's settings as trial settings."""
    return TrialSettings(
        settings.threads,
        settings.threads_batch,
        settings.sequences,
        settings.ubatch,
        settings.context,
        settings.cache_type_k,
        settings.cache_type_v,
        settings.flash_attention,
        settings.mmap,
        settings.repack,
        settings.offload_min_batch,
    )


def speed_of(
    row: BenchRow,
    place: PointScope,
    settings: Settings,
    when: str,
    source: Source = "bench",
    *,
    placement: str = UNKNOWN,
) -> SpeedRecord:
    """A row as a speed record, with its number of sequences and the fingerprint of the placement."""
    used = replace(trial_settings_of(settings), sequences=row.sequences, placement=placement)
    if row.threads is not None:
        used = replace(used, threads=row.threads, threads_batch=row.threads_batch or row.threads)
    alike = row.sequences == 1 and last_part(row.pp, row.depth, settings.ubatch)
    read = row.s_pp_tok_s if alike else None
    write = row.s_tg_tok_s
    return SpeedRecord(
        when,
        place.machine,
        place.machine_id,
        place.model,
        place.model_id,
        place.engine,
        place.build,
        source,
        used,
        row.depth,
        Figures(write.median if write else None, read.median if read else None),
        Figures(row.predicted_tg_tok_s, row.predicted_pp_tok_s if alike else None),
    )


def last_part(computed: int, depth: int, ubatch: int) -> bool:
    """Whether `computed` tokens were about the last micro-batch of a prompt, as for prefill speeds in the history."""
    usual = min(depth, ubatch)
    return abs(computed - usual) <= LENGTH_TOLERANCE * usual
