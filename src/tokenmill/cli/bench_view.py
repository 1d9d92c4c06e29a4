"""How a benchmark looks at 80 columns, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts, jsonable
from tokenmill.tune.bench import Bench
from tokenmill.tune.bench_cache import CacheEffect
from tokenmill.tune.bench_energy import Energy, Price
from tokenmill.tune.bench_rows import Row, Stat
from tokenmill.tune.bench_tables import (
    REQUEST_COLUMNS,
    SWEEP_COLUMNS,
    TURN_COLUMNS,
    Cells,
    request_cells,
    sweep_cells,
    turn_cells,
)
from tokenmill.units import format_bytes


def render(bench: Bench, price: Price | None) -> list[RenderableType]:
    """All parts, each under its title."""
    parts: list[RenderableType] = [_title(bench)]
    requests = bench.of("first", "cold", "again", "tail")
    if requests:
        parts += _table("requests", REQUEST_COLUMNS, [request_cells(row) for row in requests], left=1)
        parts += _firsts(requests)
    if bench.cache is not None:
        parts += _cached(bench.cache)
    sweep = bench.of("sweep")
    if sweep:
        title = "by depth: TG tokens are written behind N_KV + PP"
        parts += _table(title, SWEEP_COLUMNS, [sweep_cells(row) for row in sweep])
    for what, label in (("threads", "Threads"), ("sequences", "B")):
        rows = bench.of(what)
        if rows:
            title = "by threads" if what == "threads" else "by sequences at once (B), all together"
            parts += _table(title, (label, *TURN_COLUMNS), turn_cells(rows, by=what))
    if bench.energy is not None:
        parts += [Text(), *_energy(bench.energy, price)]
    disturbed = list(dict.fromkeys(row.disturbed for row in bench.rows if row.disturbed))
    if disturbed:
        parts += [Text(), Text(f"* disturbed in every run, the last time because {disturbed[-1]}", style="yellow")]
    again = sum(row.repeated for row in bench.rows)
    if again:
        parts.append(Text(f"{again} disturbed run{'s' if again > 1 else ''} made again"))
    parts += [Text(f"note: {note}") for note in bench.notes]
    return parts


def _title(bench: Bench) -> Table:
    place, dials = bench.place, bench.dials
    rows = {
        "model": place.model,
        "machine": place.machine,
        "engine": f"{place.engine}, {place.build}",
        "measured": bench.when,
    }
    if dials is not None:
        rows["settings"] = (
            f"threads {dials.threads} ({dials.threads_batch} in prefill), ubatch {dials.ubatch}, "
            f"{dials.sequences} x {dials.context} tokens, cache {dials.cache_type_k}/{dials.cache_type_v}"
        )
    return facts(rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Cells], *, left: int = 0) -> list[RenderableType]:
    """A title and a table with the columns that say something in some row; predicted figures under their own head."""
    used = [at for at in range(len(columns)) if any(row[at] not in ("", "-") for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for at in used:
        table.add_column(columns[at].replace("predicted ", "predicted\n"), justify="left" if at < left else "right")
    for row in rows:
        table.add_row(*(row[at] for at in used))
    return [Text(), Text(title, style="bold"), table]


def _firsts(rows: Sequence[Row]) -> list[RenderableType]:
    """The first request against the steady state."""
    found = {row.what: row for row in rows}
    first, cold = found.get("first"), found.get("cold")
    if first is None or cold is None or first.total_s is None or cold.total_s is None:
        return []
    ratio = first.total_s.median / cold.total_s.median
    words = f"the first request took {ratio:.2f} times what a new prompt takes in steady state"
    return [Text(words)]


def _cached(effect: CacheEffect) -> list[RenderableType]:
    saved = "an unknown number of" if effect.saved_tokens is None else f"{effect.saved_tokens:,}"
    words = (
        f"prompt cache: {saved} of {effect.prompt_tokens:,} tokens saved; the first token comes after "
        f"{_ms(effect.lookup_s)}, not {_ms(effect.cold_s)}: {effect.times:.1f} times sooner"
    )
    state = []
    if effect.state_bytes is not None:
        state.append(f"{format_bytes(effect.state_bytes)} saved to a file")
    if effect.predicted_state_bytes is not None:
        state.append(f"{format_bytes(effect.predicted_state_bytes)} predicted for its cells")
    return [Text(words), *([Text(f"state of the prompt: {', '.join(state)}")] if state else [])]


def _ms(value: Stat) -> str:
    return f"{value.median * 1e3:.0f} ms" if value.median < 10 else f"{value.median:.1f} s"


def _energy(energy: Energy, price: Price | None) -> list[RenderableType]:
    if energy.why_not is not None:
        hint = "; --watts takes a wall meter's figure"
        return [Text(f"energy: not readable: {energy.why_not}{hint}")]
    parts: list[RenderableType] = []
    for name, joules in (("written", energy.decode_j), ("of a prompt", energy.prefill_j)):
        if joules is not None:
            cost = "" if price is None else f"; a million cost {_money(price, joules.median)}"
            parts.append(Text(f"energy of a token {name}: {joules.median:.3g} J ±{joules.spread:.0%}{cost}"))
    alone = "" if price is None else "; the cost is that of energy alone"
    return [*parts, Text(f"from {energy.source}, the whole machine's, idle power included{alone}")]


def _money(price: Price, joules: float) -> str:
    return f"{price.of_million(joules):.3g} {price.currency}".rstrip()


def document(bench: Bench, price: Price | None) -> dict[str, Any]:
    """Everything as JSON."""
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
        **jsonable(bench.place), "kind": "measured", "when": bench.when, "settings": jsonable(bench.dials),
        "rows": jsonable(bench.rows), "cache": jsonable(bench.cache), "energy": jsonable(energy),
        "cost_per_million": cost, "notes": list(bench.notes),
    }  # fmt: skip
