"""A benchmark as text for other programs: CSV with one line for each point, and Markdown in the field's columns.

Columns are named as llama-sweep-bench names them: PP, TG, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s. Every figure is
measured; predicted ones have columns of their own.
"""

import csv
import io
from collections.abc import Sequence

from tokenmill.tuner.bench import Bench
from tokenmill.tuner.bench_energy import Price
from tokenmill.tuner.bench_rows import Row, Stat
from tokenmill.tuner.bench_words import cache_words, disturbed_words, end_words, energy_words, first_words

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
    "tail": "same head, new tail",
}
Cells = Sequence[str]


def as_csv(bench: Bench) -> str:
    """All points, one on a line, with where and when they hold."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        writer.writerow(_csv_row(row, bench))
    return text.getvalue()


def _csv_row(row: Row, bench: Bench) -> list[object]:
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
    """Tables to paste, with machine, engine build and date above them, and what is said beside them."""
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
    """A paragraph with a line for each; none where there is nothing to say."""
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


def sweep_cells(row: Row) -> Cells:
    """A row as llama-sweep-bench prints it, spread and forecast beside it."""
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


def request_cells(row: Row) -> Cells:
    """A request with how much of its prompt was there."""
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


def turn_cells(rows: Sequence[Row], *, by: str) -> list[Cells]:
    """Rows by threads or by sequences, each as a share of the best."""
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
    """To the millisecond, as the field prints them."""
    return "-" if value is None else f"{value.median:.3f}" if value.median < 100 else f"{value.median:.1f}"


def speed(value: Stat | None) -> str:
    """Tokens a second."""
    return "-" if value is None else figure(value.median)


def figure(value: float | None) -> str:
    """Tokens a second, two digits behind the point while they mean something."""
    return (
        "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    )


def spread(value: Stat | None) -> str:
    """The run furthest from the median; nothing where there was one run."""
    return "" if value is None or value.runs < 2 else f"{value.spread:.0%}"


def mark(row: Row) -> str:
    """A star for what was disturbed in every run."""
    return "*" if row.disturbed else ""
