"""The operating point that `tokenmill tune` found, for a terminal of 80 columns."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts
from tokenmill.tuner.describe import figures_words, number_words, settings_words, short_seconds
from tokenmill.tuner.point import OperatingPoint
from tokenmill.tuner.search.noise import spread
from tokenmill.units import format_seconds, number_of

_FRONT_ROWS = 8


def outcome_shown(point: OperatingPoint, reason: str) -> list[RenderableType]:
    """The operating point, its speeds and trade-offs, and the Pareto front."""
    settings = point.dials
    figures = point.figures
    rows = {
        "settings": settings_words(settings, whole=True),
        "measured": figures_words(figures, whole=True),
        "knee": point.knee,
        "trade-off": "\n".join(point.given_up) or "none",
        "trials": f"{number_of(len(point.trials), 'trial')}, {number_of(point.loads, 'load')}, "
        f"{format_seconds(point.seconds)}; {reason}",
        "noise": _noise_words(point),
    }
    parts: list[RenderableType] = [facts({label: value for label, value in rows.items() if value})]
    if len(point.front) > 1:
        parts += [Text(), _front(point)]
    when = f" with --context {settings.context} or less" if point.context_given else ""
    return [*parts, Text(), Text(f"saved; plan, run and serve{when} use it from now on")]


def _front(point: OperatingPoint) -> Table:
    """The trials on the Pareto front; the operating point is marked."""
    table = Table(
        title="Pareto front, speeds in tok/s: no trial is better than these in every figure",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    energy = any(trial.figures.joules_per_token is not None for trial in point.front)
    first = any(trial.figures.first_token_s is not None for trial in point.front)
    columns = ["seqs", "threads", "ubatch", "context", "cache", "batch", "decode", "prefill"]
    for name in (*columns, *(["TTFT"] if first else []), *(["J/token"] if energy else []), ""):
        table.add_column(name, justify="right" if name not in ("cache", "") else "left")
    shown = sorted(point.front, key=lambda trial: -(trial.figures.jobs_tok_s or trial.figures.decode_tok_s or 0.0))
    for trial in shown[:_FRONT_ROWS]:
        settings = trial.dials
        figures = trial.figures
        cells = [
            str(settings.sequences),
            str(settings.threads),
            str(settings.ubatch),
            str(settings.context),
            settings.cache_type_k,
        ]
        cells += [
            number_words(figures.jobs_tok_s),
            number_words(figures.decode_tok_s),
            number_words(figures.prefill_tok_s),
        ]
        if first:
            cells.append("" if figures.first_token_s is None else short_seconds(figures.first_token_s))
        if energy:
            cells.append(number_words(figures.joules_per_token))
        table.add_row(*cells, "<" if settings == point.dials else "")
    if len(point.front) > _FRONT_ROWS:
        table.caption = f"and {len(point.front) - _FRONT_ROWS} more; --json prints all of them"
    return table


def _noise_words(point: OperatingPoint) -> str:
    figure = "decode_tok_s" if point.figures.jobs_tok_s is None else "jobs_tok_s"
    if spread(point.trials, figure) is None:
        return f"{point.noise:.1%} assumed; too few trials were repeated to measure it"
    return f"{point.noise:.1%}; smaller differences are not significant"
