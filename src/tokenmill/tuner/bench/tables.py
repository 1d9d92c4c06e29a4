"""A benchmark as text: CSV with one line per point, Markdown tables, and sentences.

Columns have the names of llama-sweep-bench: PP, TG, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s. Predicted figures have
separate columns.
"""

import csv
import io
from collections.abc import Iterator, Sequence

from tokenmill.tuner.bench.cache import CacheEffect
from tokenmill.tuner.bench.energy import Energy, Price
from tokenmill.tuner.bench.rows import BenchRow, Stat
from tokenmill.tuner.bench.run import Bench
from tokenmill.units import format_bytes

COLUMNS = (
    "what",
    "threads",
    "sequences",
    "pp",
    "tg",
    "n_kv",
    "prompt_tokens",
    "t_pp_s",
    "s_pp_t_s",
    "s_pp_spread",
    "t_tg_s",
    "s_tg_t_s",
    "s_tg_spread",
    "total_s",
    "runs",
    "engine_t_pp_s",
    "engine_t_tg_s",
    "predicted_s_pp_t_s",
    "predicted_s_tg_t_s",
    "disturbed",
    "kind",
    "machine",
    "model",
    "engine",
    "build",
    "when",
)
TITLES = {
    "first": "first request",
    "cold": "new prompt",
    "again": "same prompt again",
    "tail": "same prefix, new tail",
}
Cells = Sequence[str]


def as_csv(bench: Bench) -> str:
    """CSV with all points, one per line, with machine, build and date."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        writer.writerow(_csv_row(row, bench))
    return text.getvalue()


def _csv_row(row: BenchRow, bench: Bench) -> list[object]:
    place = bench.place
    values = [
        row.what,
        row.threads,
        row.sequences,
        row.pp,
        row.tg,
        row.n_kv,
        row.prompt_tokens,
        _median(row.t_pp_s),
        _median(row.s_pp_tok_s),
        _spread(row.s_pp_tok_s),
        _median(row.t_tg_s),
        _median(row.s_tg_tok_s),
        _spread(row.s_tg_tok_s),
        _median(row.total_s),
        row.total_s.runs if row.total_s else None,
        row.engine_t_pp_s,
        row.engine_t_tg_s,
        row.predicted_pp_tok_s,
        row.predicted_tg_tok_s,
        row.disturbed,
        "measured",
        place.machine,
        place.model,
        place.engine,
        place.build,
        bench.when,
    ]
    return [f"{value:.6g}" if isinstance(value, float) else "" if value is None else value for value in values]


def _median(value: Stat | None) -> float | None:
    return None if value is None else value.median


def _spread(value: Stat | None) -> float | None:
    return None if value is None else value.spread


def as_markdown(bench: Bench, price: Price | None = None) -> str:
    """Markdown tables, with machine, engine build and date above and notes below."""
    place = bench.place
    parts = [f"Measured on {place.machine}: {place.model}, {place.build}, {bench.when}."]
    requests = bench.of("first", "cold", "again", "tail")
    sweep = bench.of("sweep")
    if requests:
        parts.append(_grid(REQUEST_COLUMNS, [request_cells(row) for row in requests]))
    parts += _sentences([*first_words(requests), *(cache_words(bench.cache) if bench.cache is not None else ())])
    if sweep:
        parts.append(_grid(SWEEP_COLUMNS, [sweep_cells(row) for row in sweep]))
    if bench.of("threads"):
        parts.append(_grid(("Threads", *TURN_COLUMNS), turn_cells(bench.of("threads"), by="threads")))
    if bench.of("sequences"):
        parts.append(_grid(("B", *TURN_COLUMNS), turn_cells(bench.of("sequences"), by="sequences")))
    if bench.energy is not None:
        parts += _sentences([*energy_words(bench.energy, price)])
    disturbed = disturbed_words(bench)
    parts += _sentences(([] if disturbed is None else ["\\" + disturbed]) + [*end_words(bench)])
    return "\n\n".join(parts) + "\n"


def _sentences(words: Sequence[str]) -> list[str]:
    """A paragraph with one line per sentence; nothing without sentences."""
    return ["  \n".join(words)] if words else []


def _grid(columns: Cells, rows: Sequence[Cells]) -> str:
    lines = [columns, ["---:"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


SWEEP_COLUMNS = (
    "PP",
    "TG",
    "N_KV",
    "T_PP s",
    "S_PP t/s",
    "±",
    "T_TG s",
    "S_TG t/s",
    "±",
    "predicted S_PP",
    "predicted S_TG",
)
REQUEST_COLUMNS = ("Request", "Prompt", "cached", "first s", "PP t/s", "Gen", "TG t/s", "±", "Total s")
TURN_COLUMNS = ("PP t/s", "±", "TG t/s", "±", "of best", "predicted PP", "predicted TG")


def sweep_cells(row: BenchRow) -> Cells:
    """A row in the columns of llama-sweep-bench, with spread and forecast."""
    return (
        str(row.pp),
        str(row.tg),
        "?" if row.n_kv is None else str(row.n_kv),
        seconds(row.t_pp_s),
        speed(row.s_pp_tok_s),
        spread(row.s_pp_tok_s),
        seconds(row.t_tg_s),
        speed(row.s_tg_tok_s),
        spread(row.s_tg_tok_s) + mark(row),
        figure(row.predicted_pp_tok_s),
        figure(row.predicted_tg_tok_s),
    )


def request_cells(row: BenchRow) -> Cells:
    """A request with the cached part of its prompt."""
    return (
        TITLES[row.what],
        str(row.prompt_tokens),
        "?" if row.n_kv is None else str(row.n_kv),
        seconds(row.t_pp_s),
        speed(row.s_pp_tok_s),
        str(row.tg),
        speed(row.s_tg_tok_s),
        spread(row.s_tg_tok_s) + mark(row),
        seconds(row.total_s),
    )


def turn_cells(rows: Sequence[BenchRow], *, by: str) -> list[Cells]:
    """Rows by threads or by sequences, each with its share of the best."""
    best = max((row.s_tg_tok_s.median for row in rows if row.s_tg_tok_s), default=None)
    return [
        (
            str(getattr(row, by)),
            speed(row.s_pp_tok_s),
            spread(row.s_pp_tok_s),
            speed(row.s_tg_tok_s),
            spread(row.s_tg_tok_s) + mark(row),
            f"{row.s_tg_tok_s.median / best:.0%}" if best and row.s_tg_tok_s else "-",
            figure(row.predicted_pp_tok_s),
            figure(row.predicted_tg_tok_s),
        )
        for row in rows
    ]


def seconds(value: Stat | None) -> str:
    """Seconds with three decimals."""
    return "-" if value is None else f"{value.median:.3f}" if value.median < 100 else f"{value.median:.1f}"


def speed(value: Stat | None) -> str:
    """Tokens per second."""
    return "-" if value is None else figure(value.median)


def figure(value: float | None) -> str:
    """Tokens per second, with two decimals where they are significant."""
    return (
        "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    )


def spread(value: Stat | None) -> str:
    """Largest distance from the median in per cent; empty for one run."""
    return "" if value is None or value.runs < 2 else f"{value.spread:.0%}"


def mark(row: BenchRow) -> str:
    """A star if every run was disturbed."""
    return "*" if row.disturbed else ""


def first_words(rows: Sequence[BenchRow]) -> Iterator[str]:
    """The first request compared with the steady state."""
    found = {row.what: row for row in rows}
    first = found.get("first")
    cold = found.get("cold")
    if first is None or cold is None or first.total_s is None or cold.total_s is None:
        return
    ratio = first.total_s.median / cold.total_s.median
    yield f"the first request took {ratio:.2f} times as long as a new prompt in steady state"


def cache_words(effect: CacheEffect) -> Iterator[str]:
    """The saving of the prompt cache, and the size of the prompt's state."""
    saved = "an unknown number of" if effect.saved_tokens is None else f"{effect.saved_tokens:,}"
    yield (
        f"prompt cache: {saved} of {effect.prompt_tokens:,} tokens saved; first token after "
        f"{_ms(effect.lookup_s)}, not {_ms(effect.cold_s)}: {effect.times:.1f} times faster"
    )
    state = []
    if effect.state_bytes is not None:
        state.append(f"{format_bytes(effect.state_bytes)} saved to a file")
    if effect.predicted_state_bytes is not None:
        state.append(f"{format_bytes(effect.predicted_state_bytes)} predicted for its KV cells")
    if state:
        yield f"state of the prompt: {', '.join(state)}"


def energy_words(energy: Energy, price: Price | None) -> Iterator[str]:
    """Joules per token, the cost of a million tokens, and the source of the figures."""
    if energy.why_not is not None:
        yield f"energy: unknown: {energy.why_not}; use --watts to give the power of a wall meter"
        return
    for name, joules in (("generated", energy.decode_j), ("prompt", energy.prefill_j)):
        if joules is not None:
            cost = "" if price is None else f"; {_money(price, joules.median)} per million"
            yield f"energy per {name} token: {joules.median:.3g} J ±{joules.spread:.0%}{cost}"
    alone = "" if price is None else "; the cost is that of electricity alone"
    yield f"source: {energy.source}, for the whole machine with its idle power{alone}"


def disturbed_words(bench: Bench) -> str | None:
    """The meaning of the star in the tables; None if no row has one."""
    found = list(dict.fromkeys(row.disturbed for row in bench.rows if row.disturbed))
    return f"* every run was disturbed, the last one because {found[-1]}" if found else None


def end_words(bench: Bench) -> Iterator[str]:
    """The number of repeated runs, and the notes."""
    again = sum(row.repeated for row in bench.rows)
    if again:
        yield f"{again} disturbed run{'s' if again > 1 else ''} repeated"
    yield from (f"note: {note}" for note in bench.notes)


def _ms(value: Stat) -> str:
    return f"{value.median * 1e3:.0f} ms" if value.median < 10 else f"{value.median:.1f} s"


def _money(price: Price, joules: float) -> str:
    return f"{price.of_million(joules):.3g} {price.currency}".rstrip()
