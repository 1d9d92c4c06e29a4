"""Predictions compared with measurements, for each memory and each figure. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median

from tokenmill.engine.load_history import LoadRecord
from tokenmill.engine.reconcile.reconcile import HOST, ReconciledItem
from tokenmill.hardware.machine import Tier
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import ITEMS, Plan
from tokenmill.report.curves import settings_text
from tokenmill.report.report import BarSegment, FigureComparison, FigureOrigin, Loaded, TierPicture
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures

PAGE_CACHE = "page_cache"
FREE = "free"
SHOWN = (*ITEMS, "output", PAGE_CACHE, FREE)
"""Every item of a bar, in drawing order."""
_SPEEDS = (("decode", "decode_tok_s"), ("prefill", "prefill_tok_s"), ("jobs", "jobs_tok_s"))
_SOURCES = {"engine": "the engine", "process": "the kernel", "driver": "the GPU driver"}


def pictures(plan: Plan, load: LoadRecord | None) -> tuple[TierPicture, ...]:
    """The memories that the plan uses, fastest first."""
    host = host_tier(plan.machine)
    return tuple(
        _picture(plan, tier, load, HOST if tier.name == host else tier.name)
        for tier in plan.machine.tiers()
        if plan.ledger.total(tier.name) or plan.ledger.total(tier.name, "load_peak")
    )


def load_for(plan: Plan, loads: Sequence[LoadRecord]) -> LoadRecord | None:
    """The newest load with the plan's context and sequences, else the newest load."""
    alike = [load for load in loads if _shape(load.settings) == (plan.settings.context, plan.settings.sequences)]
    found = alike or loads
    return found[-1] if found else None


def load_words(settings: dict[str, object]) -> str:
    """The settings that determine memory sizes, as text."""
    context, sequences = _shape(settings)
    return f"{sequences} x {context} tokens, ubatch {settings.get('ubatch')}, cache {settings.get('cache_type_k')}"


def _shape(settings: dict[str, object]) -> tuple[object, object]:
    return settings.get("context"), settings.get("sequences")


def _picture(plan: Plan, tier: Tier, load: LoadRecord | None, row_tier: str) -> TierPicture:
    dropped = sum(row.bytes for row in plan.ledger.page_cache if row.tier == tier.name)
    sizes: dict[str, int] = {item: plan.ledger.of(tier.name, item) for item in ITEMS}
    sizes["weights"] -= dropped
    sizes[PAGE_CACHE] = dropped
    capacity = tier.capacity_bytes
    missing = [shortfall.missing_bytes for shortfall in plan.shortfalls if shortfall.tier == tier.name]
    return TierPicture(
        tier.name,
        tier.kind,
        capacity,
        tier.nominal_gb_s,
        tier.measured_gb_s,
        planned=tuple(BarSegment(item, size) for item, size in sizes.items() if size > 0),
        free_bytes=None if capacity is None else max(0, capacity - plan.ledger.needed(tier.name)),
        loading_bytes=plan.ledger.needed(tier.name, "load_peak"),
        missing_bytes=max(missing, default=0),
        loaded=None if load is None else _loaded(load, row_tier),
    )


def _loaded(load: LoadRecord, tier: str) -> Loaded | None:
    """The buffers that the engine reports; figures of the kernel and the GPU driver are only in the comparisons."""
    rows = [row for row in load.rows if row.tier == tier and row.source == "engine" and row.measured_bytes is not None]
    if not rows:
        return None
    return Loaded(
        predicted=_parts(rows, measured=False),
        measured=_parts(rows, measured=True),
        origin=FigureOrigin("measured", load.machine, load.build, load.when),
        settings=load_words(load.settings),
    )


def _parts(rows: Sequence[ReconciledItem], *, measured: bool) -> tuple[BarSegment, ...]:
    sizes = [(row.item, (row.measured_bytes if measured else row.predicted_bytes) or 0) for row in rows]
    ordered = sorted(sizes, key=lambda size: SHOWN.index(size[0]))
    return tuple(BarSegment(item, size) for item, size in ordered if size > 0)


def comparisons(speeds: Sequence[SpeedRecord], load: LoadRecord | None) -> list[FigureComparison]:
    """All figures with a prediction and a measurement: sizes, then speeds; of equal settings the newest."""
    newest: dict[object, FigureComparison] = {}
    for speed in speeds:
        for what, name in _SPEEDS:
            found = _speed(speed, what, name)
            if found is not None:
                newest[what, found.at, speed.build, speed.engine, speed.source] = found
    return [*(() if load is None else _load(load)), *newest.values()]


def typical_error(found: Sequence[FigureComparison]) -> float | None:
    """The median absolute error."""
    errors = [abs(each.error) for each in found if each.error is not None]
    return median(errors) if errors else None


def _speed(speed: SpeedRecord, what: str, name: str) -> FigureComparison | None:
    measured = _figure(speed.figures, name)
    predicted = _figure(speed.predicted, name)
    if measured is None or predicted is None:
        return None
    at = settings_text(speed.dials) + (f", at depth {speed.depth}" if speed.depth else "")
    origin = FigureOrigin("measured", speed.machine, speed.build, speed.when, note=f"tokenmill {speed.source}")
    return FigureComparison(what, at, "tok/s", predicted, measured, origin)


def _figure(figures: Figures, name: str) -> float | None:
    value: float | None = getattr(figures, name)
    return value


def _load(load: LoadRecord) -> Iterator[FigureComparison]:
    at = load_words(load.settings)
    origin = FigureOrigin("measured", load.machine, load.build, load.when)
    for row in load.rows:
        if row.measured_bytes is not None:
            what = f"{row.tier} {row.item.replace('_', ' ')}, reported by {_SOURCES[row.source]}"
            yield FigureComparison(what, at, "bytes", row.predicted_bytes, row.measured_bytes, origin, row.explanation)
