"""The facts about a ready engine that `tokenmill serve --engine-only` prints."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tokenmill.cli.output import facts, jsonable
from tokenmill.engine.pinned_prefixes import PrefixResult
from tokenmill.engine.reconcile.reconcile import Reconciliation
from tokenmill.native.launching import ReadyEngine
from tokenmill.units import format_bytes, format_seconds


def engine_facts(name: str, up: ReadyEngine, *, detach: bool) -> list[RenderableType]:
    """The engine, its load, and its predicted and measured memory."""
    identity = up.engine.identity
    rows = {
        "engine": f"{name}: {identity.kind}, {identity.build}",
        "model": identity.model,
        "address": identity.address,
        "slots": f"{identity.slots}, context {identity.context:,} tokens each",
        "load": format_seconds(up.load_s) + _read_ahead(up),
    }
    if up.warmth is not None:
        rows["warm"] = up.warmth.cold_start.describe()
        if up.warmth.prefixes:
            rows["digest"] = "\n".join(map(prefix_text, up.warmth.prefixes))
    notes = (*up.refused, *up.engine.capabilities.notes, *(up.warmth.notes if up.warmth else ()))
    if notes:
        rows["note"] = "\n".join(notes)
    stop = f"tokenmill engines stop {name}" if detach else "press Ctrl-C"
    return [facts(rows), "", *_reconciliation(up.held), "", f"ready; to stop the engine: {stop}"]


def prefix_text(prefix: PrefixResult) -> str:
    """How a pinned prefix got into an engine's cache, or that it did not."""
    if prefix.how == "failed":
        return f"{prefix.name}: not in the cache"
    where = f"; saved as {prefix.saved}" if prefix.saved and prefix.how == "computed" else ""
    return f"{prefix.name}: {prefix.prompt_tokens:,} tokens {prefix.how} in {format_seconds(prefix.seconds)}{where}"


def _read_ahead(up: ReadyEngine) -> str:
    if up.filled is None or not up.filled.read_bytes:
        return ""
    return f", after {format_seconds(up.filled.seconds)} of reading {format_bytes(up.filled.read_bytes)} ahead"


def _reconciliation(held: Reconciliation) -> list[RenderableType]:
    """Predicted and measured memory of each item, with known reasons for large differences."""
    table = Table(box=None, pad_edge=False)
    for column in ("memory", "item"):
        table.add_column(column)
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for row in held.rows:
        if row.measured_bytes is None or not (row.measured_bytes or row.predicted_bytes):
            continue
        share = "" if row.share is None else f"{row.share:+.1%}"
        table.add_row(
            row.tier,
            row.item,
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            share + (" *" if row.flagged else ""),
        )
    notes = [f"* {row.tier} {row.item}: {row.explanation}" for row in held.flagged if row.explanation]
    return [table, *notes]


def document(name: str, up: ReadyEngine) -> dict[str, Any]:
    """The facts as JSON."""
    engine = up.engine
    return {
        "name": name,
        **jsonable(engine.identity),
        "capabilities": jsonable(engine.capabilities),
        "load_s": up.load_s,
        "read_ahead": jsonable(up.filled),
        "warm": jsonable(up.warmth),
        "refused": up.refused,
        "reconciliation": [
            {**jsonable(row), "difference_bytes": row.difference_bytes, "flagged": row.flagged} for row in up.held.rows
        ],
    }
