"""The picture of the memories: what a plan puts into each, beside what the newest load of that model took. Pure."""

from collections.abc import Sequence

from tokenmill.engine.measured import Record
from tokenmill.engine.reconcile import HOST, Row
from tokenmill.hardware.machine import Tier
from tokenmill.planner.place import host_tier
from tokenmill.planner.plan import ITEMS, Plan
from tokenmill.report.report import Loaded, Origin, Part, TierPicture

PAGE_CACHE = "page_cache"
FREE = "free"
SHOWN = (*ITEMS, "output", PAGE_CACHE, FREE)
"""Every item a bar can have, in the order it is drawn."""


def pictures(plan: Plan, load: Record | None) -> tuple[TierPicture, ...]:
    """Every memory that the plan uses, fastest first."""
    host = host_tier(plan.machine)
    return tuple(
        _picture(plan, tier, load, HOST if tier.name == host else tier.name)
        for tier in plan.machine.tiers()
        if plan.ledger.total(tier.name) or plan.ledger.total(tier.name, "load_peak")
    )


def load_for(plan: Plan, loads: Sequence[Record]) -> Record | None:
    """The newest load with the plan's context and sequences; where there is none, the newest of all."""
    alike = [load for load in loads if _shape(load.settings) == (plan.settings.context, plan.settings.sequences)]
    found = alike or loads
    return found[-1] if found else None


def load_words(settings: dict[str, object]) -> str:
    """The settings that decide sizes, in a few words."""
    context, sequences = _shape(settings)
    return f"{sequences} x {context} tokens, ubatch {settings.get('ubatch')}, cache {settings.get('cache_type_k')}"


def _shape(settings: dict[str, object]) -> tuple[object, object]:
    return settings.get("context"), settings.get("sequences")


def _picture(plan: Plan, tier: Tier, load: Record | None, row_tier: str) -> TierPicture:
    dropped = sum(row.bytes for row in plan.ledger.page_cache if row.tier == tier.name)
    sizes: dict[str, int] = {item: plan.ledger.of(tier.name, item) for item in ITEMS}
    sizes["weights"] -= dropped
    sizes[PAGE_CACHE] = dropped
    room = tier.capacity_bytes
    missing = [lack.missing_bytes for lack in plan.shortfalls if lack.tier == tier.name]
    return TierPicture(
        tier.name,
        tier.kind,
        room,
        tier.nominal_gb_s,
        tier.measured_gb_s,
        planned=tuple(Part(item, size) for item, size in sizes.items() if size > 0),
        free_bytes=None if room is None else max(0, room - plan.ledger.needed(tier.name)),
        loading_bytes=plan.ledger.needed(tier.name, "load_peak"),
        missing_bytes=max(missing, default=0),
        loaded=None if load is None else _loaded(load, row_tier),
    )


def _loaded(load: Record, tier: str) -> Loaded | None:
    """The engine's own buffers; the process's and the driver's figures are in the table of comparisons."""
    rows = [row for row in load.rows if row.tier == tier and row.source == "engine" and row.measured_bytes is not None]
    if not rows:
        return None
    return Loaded(
        predicted=_parts(rows, measured=False),
        measured=_parts(rows, measured=True),
        origin=Origin("measured", load.machine, load.build, load.when),
        settings=load_words(load.settings),
    )


def _parts(rows: Sequence[Row], *, measured: bool) -> tuple[Part, ...]:
    sizes = [(row.item, (row.measured_bytes if measured else row.predicted_bytes) or 0) for row in rows]
    ordered = sorted(sizes, key=lambda size: SHOWN.index(size[0]))
    return tuple(Part(item, size) for item, size in ordered if size > 0)
