"""How a history looks: a line with its curve for each quantity, the newest measurements, and the errors together."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.history_rows import FEW, HistoryRow, Trend, errors, speeds_in, trends
from tokenmill.units import format_bytes, format_seconds, number_of

CURVE = 12  # characters
_BARS = "▁▂▃▄▅▆▇█"
_LARGE_ERROR = 0.2


def rendered(rows: Sequence[HistoryRow], last: int) -> list[RenderableType]:
    """The history for a person, at 80 columns."""
    parts: list[RenderableType] = []
    for (model, machine), group in groupby(trends(rows), key=lambda trend: (trend.model, trend.machine)):
        parts += [Text.assemble((model, "bold"), f" on {machine}"), _trends(list(group)), Text()]
    shown = rows[-last:] if last else []
    if shown:
        parts += [_measurements(shown), Text()]
    parts.append(Text(_together(rows)))
    return parts


def curve(values: Sequence[float], width: int = CURVE) -> str:
    """Values as bars, oldest first; more than fit are taken together."""
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
    for name in ("times", "last", "predicted", "off by", "median"):
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
    table = Table("when", "from", "what", "with", box=None, pad_edge=False)
    for name in ("predicted", "measured", "off by"):
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


def _together(rows: Sequence[HistoryRow]) -> str:
    speeds = speeds_in(rows)
    first, last, count = errors(speeds)
    if not speeds:
        return "no speed was measured yet: tokenmill tune, bench and soak do"
    if first is None or last is None:
        return "no speed was predicted: tokenmill probe --measure gives the forecast what it lacks"
    what = f"{number_of(count, 'prediction')} of speed, off by"
    if count <= FEW:
        return f"{what} {last:.0%} in the median"
    return f"{what} {first:.0%} in the median of the first ten and {last:.0%} of the last ten"


def _first_and_now(trend: Trend) -> str:
    if trend.first_error is None or trend.last_error is None:
        return ""
    if trend.predictions <= FEW:
        return f"{trend.last_error:.0%}"
    return f"{trend.first_error:.0%} → {trend.last_error:.0%}"


def _unit(row: HistoryRow) -> str:
    return f", {row.unit}" if row.unit in ("tok/s", "J/token") else ""


def figure(row: HistoryRow, value: float | None) -> str:
    """A figure with as many digits as mean something."""
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
    return Text(f"{error:+.0%}", style="yellow" if abs(error) > _LARGE_ERROR else "")
