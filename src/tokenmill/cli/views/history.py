"""The measurement history for a terminal: a trend per quantity, the newest measurements, and the forecast error."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.measuring.history_rows import COMPARED, HistoryRow, Trend, errors, speeds_in, trends
from tokenmill.units import format_bytes, format_seconds, number_of

CURVE = 12  # maximum characters
_BARS = "▁▂▃▄▅▆▇█"
_LARGE_ERROR = 0.2


def rendered(rows: Sequence[HistoryRow], last: int) -> list[RenderableType]:
    """The history at 80 columns; `last` limits the measurements listed."""
    parts: list[RenderableType] = []
    for (model, machine), group in groupby(trends(rows), key=lambda trend: (trend.model, trend.machine)):
        parts += [Text.assemble((model, "bold"), f" on {machine}"), _trends(list(group)), Text()]
    shown = rows[-last:] if last else []
    if shown:
        parts += [_measurements(shown), Text()]
    parts.append(Text(_forecast_error(rows)))
    return parts


def curve(values: Sequence[float], width: int = CURVE) -> str:
    """A sparkline, oldest value first; neighbouring values are averaged if there are more than `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(at * len(values) / count) for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means)
    high = max(means)
    if high <= low:
        return _BARS[3] * count
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in means)


def _trends(found: Sequence[Trend]) -> Table:
    table = Table("", "over time", box=None, pad_edge=False)
    for name in ("runs", "last", "predicted", "error", "median error"):
        table.add_column(name, justify="right")
    for trend in found:
        row = trend.last
        table.add_row(
            f"{trend.quantity}{_unit(row)}",
            curve(trend.measured),
            str(len(trend.measured)),
            figure(row, row.measured),
            figure(row, row.predicted),
            _error(row.error),
            _first_and_now(trend),
        )
    return table


def _measurements(rows: Sequence[HistoryRow]) -> Table:
    table = Table("date", "source", "quantity", "settings", box=None, pad_edge=False)
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for row in rows:
        depth = f", depth {row.depth:,}" if row.depth is not None else ""
        table.add_row(
            row.when[:10],
            row.source,
            row.quantity,
            Text(f"{row.settings}{depth}"),
            figure(row, row.predicted),
            figure(row, row.measured),
            _error(row.error),
        )
    return table


def _forecast_error(rows: Sequence[HistoryRow]) -> str:
    speeds = speeds_in(rows)
    first, last, count = errors(speeds)
    if not speeds:
        return "no speeds have been measured; tokenmill tune, bench and soak measure them, and so do longer batches"
    if all(row.source == "run" for row in speeds):
        return "only batches were measured, maybe on a busy machine; forecasts are corrected by tune, bench and soak"
    if first is None or last is None:
        return "no speeds were predicted; tokenmill probe --measure measures the bandwidths that forecasts need"
    predictions = number_of(count, "speed prediction")
    if count <= COMPARED:
        return f"{predictions}, median error {last:.0%}"
    return f"{predictions}, median error {first:.0%} of the first ten, {last:.0%} of the last ten"


def _first_and_now(trend: Trend) -> str:
    if trend.first_error is None or trend.last_error is None:
        return ""
    if trend.predictions <= COMPARED:
        return f"{trend.last_error:.0%}"
    return f"{trend.first_error:.0%} → {trend.last_error:.0%}"


def _unit(row: HistoryRow) -> str:
    return f", {row.unit}" if row.unit in ("tok/s", "J/token") else ""


def figure(row: HistoryRow, value: float | None) -> str:
    """A figure with its significant digits; `-` for None."""
    if value is None:
        return "-"
    if row.unit == "bytes":
        return format_bytes(round(value))
    if row.unit == "s":
        return format_seconds(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _error(error: float | None) -> Text:
    if error is None:
        return Text("")
    return Text("0%" if abs(error) < 0.005 else f"{error:+.0%}", style="yellow" if abs(error) > _LARGE_ERROR else "")
