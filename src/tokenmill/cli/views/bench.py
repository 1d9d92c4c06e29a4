"""A benchmark for a terminal of 80 columns and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts, jsonable
from tokenmill.tuner.bench.energy import Price
from tokenmill.tuner.bench.run import Bench
from tokenmill.tuner.bench.tables import (
    REQUEST_COLUMNS,
    SWEEP_COLUMNS,
    TURN_COLUMNS,
    Cells,
    cache_words,
    disturbed_words,
    end_words,
    energy_words,
    first_words,
    request_cells,
    sweep_cells,
    turn_cells,
)


def render(bench: Bench, price: Price | None) -> list[RenderableType]:
    """The sections that were measured, each with a title."""
    parts: list[RenderableType] = [_title(bench)]
    requests = bench.of("first", "cold", "again", "tail")
    if requests:
        parts += _table("requests", REQUEST_COLUMNS, [request_cells(row) for row in requests], left=1)
        parts += map(Text, first_words(requests))
    if bench.cache is not None:
        parts += map(Text, cache_words(bench.cache))
    sweep = bench.of("sweep")
    if sweep:
        title = "by context depth (TG tokens generated after N_KV + PP)"
        parts += _table(title, SWEEP_COLUMNS, [sweep_cells(row) for row in sweep])
    by_setting = (("threads", "Threads", "by threads"), ("sequences", "B", "by concurrent sequences (B), total speeds"))
    for setting, label, title in by_setting:
        rows = bench.of(setting)
        if rows:
            parts += _table(title, (label, *TURN_COLUMNS), turn_cells(rows, by=setting))
    if bench.energy is not None:
        parts += [Text(), *map(Text, energy_words(bench.energy, price))]
    disturbed = disturbed_words(bench)
    if disturbed is not None:
        parts += [Text(), Text(disturbed, style="yellow")]
    parts += map(Text, end_words(bench))
    return parts


def _title(bench: Bench) -> Table:
    place = bench.place
    settings = bench.dials
    rows = {
        "model": place.model,
        "machine": place.machine,
        "engine": f"{place.engine}, {place.build}",
        "measured": bench.when,
    }
    if settings is not None:
        rows["settings"] = (
            f"threads {settings.threads} ({settings.threads_batch} in prefill), ubatch {settings.ubatch}, "
            f"{settings.sequences} x {settings.context} tokens, cache {settings.cache_type_k}/{settings.cache_type_v}"
        )
    return facts(rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Cells], *, left: int = 0) -> list[RenderableType]:
    """A titled table without its empty columns."""
    used = [at for at in range(len(columns)) if any(row[at] not in ("", "-") for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for at in used:
        table.add_column(columns[at].replace("predicted ", "predicted\n"), justify="left" if at < left else "right")
    for row in rows:
        table.add_row(*(row[at] for at in used))
    return [Text(), Text(title, style="bold"), table]


def document(bench: Bench, price: Price | None) -> dict[str, Any]:
    """The benchmark as JSON."""
    energy = bench.energy
    cost = None
    if price is not None and energy is not None and energy.why_not is None:
        cost = {
            "per_kwh": price.per_kwh,
            "currency": price.currency or None,
            "written": price.of_million(energy.decode_j.median) if energy.decode_j else None,
            "prompt": price.of_million(energy.prefill_j.median) if energy.prefill_j else None,
            "of": "energy alone",
        }
    return {
        **jsonable(bench.place),
        "kind": "measured",
        "when": bench.when,
        "settings": jsonable(bench.dials),
        "rows": jsonable(bench.rows),
        "cache": jsonable(bench.cache),
        "energy": jsonable(energy),
        "cost_per_million": cost,
        "notes": list(bench.notes),
    }
