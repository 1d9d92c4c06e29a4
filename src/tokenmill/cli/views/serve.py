"""What `tokenmill serve` shows of an engine that is ready."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tokenmill.cli.output import facts, jsonable
from tokenmill.engine.pinned_prefixes import WarmedHead
from tokenmill.engine.reconcile import Reconciliation
from tokenmill.native.launching import ReadyEngine
from tokenmill.units import format_bytes, format_seconds


def engine_facts(name: str, up: ReadyEngine, *, detach: bool) -> list[RenderableType]:
    """The engine, how it was loaded, and its memory next to the plan."""
    identity = up.engine.identity
    rows = {
        "engine": f"{name}: {identity.kind}, {identity.build}",
        "model": identity.model,
        "address": identity.address,
        "lanes": f"{identity.lanes} of {identity.context} tokens",
        "load": format_seconds(up.load_s) + _read_ahead(up),
    }
    if up.warmth is not None:
        rows["warm"] = up.warmth.cold_against_warm.as_words()
        if up.warmth.heads:
            rows["digest"] = "\n".join(map(held_words, up.warmth.heads))
    notes = (*up.refused, *up.engine.capabilities.notes, *(up.warmth.notes if up.warmth else ()))
    if notes:
        rows["note"] = "\n".join(notes)
    left = f"to stop it: tokenmill engines stop {name}" if detach else "ready; Ctrl-C stops it"
    return [facts(rows), "", *_reconciliation(up.held), "", left]


def held_words(head: WarmedHead) -> str:
    """How a pinned prefix came into an engine, or that it did not."""
    if head.how == "not held":
        return f"{head.name} is not held"
    where = f"; saved as {head.saved}" if head.saved and head.how == "computed" else ""
    return f"{head.name}: {head.prompt_tokens:,} tokens {head.how} in {format_seconds(head.seconds)}{where}"


def _read_ahead(up: ReadyEngine) -> str:
    if up.filled is None or not up.filled.read_bytes:
        return ""
    return f", after reading {format_bytes(up.filled.read_bytes)} ahead in {format_seconds(up.filled.seconds)}"


def _reconciliation(held: Reconciliation) -> list[RenderableType]:
    """Predicted and measured memory item by item, and why they differ."""
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
    """The same as JSON."""
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
