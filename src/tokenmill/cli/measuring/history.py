"""`tokenmill history`: lists the measurements of this machine next to their predictions."""

import csv
import io
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tokenmill import measurements
from tokenmill.api.engines.speeds import StageSpeed
from tokenmill.api.planning.plan import locate
from tokenmill.cli.measuring.history_rows import HistoryRow, errors, rows_of, speeds_in, trends
from tokenmill.cli.options import Model
from tokenmill.cli.output import Common, jsonable, say, show, show_json
from tokenmill.cli.views.history import rendered
from tokenmill.engine import load_history
from tokenmill.errors import UsageError
from tokenmill.model.identity import identity_of
from tokenmill.storage.atomic import new_file
from tokenmill.tuner import history as speeds

Source = Literal["tune", "bench", "run", "soak", "load"]
LAST = 10
COLUMNS = (
    "when",
    "machine",
    "machine_id",
    "model",
    "model_id",
    "engine",
    "build",
    "source",
    "settings",
    "depth",
    "quantity",
    "unit",
    "predicted",
    "measured",
    "error",
)


def history(
    *,
    model: Model = None,
    source: Source | None = None,
    last: int = LAST,
    export: Annotated[Path | None, Parameter(name="--export", metavar="FILE")] = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Show measurements on this machine over time, with the predictions made for them and their errors.

    tune, bench, soak, every load of a model and every batch of some length add to the history. `plan`, `run` and
    `serve` correct their forecasts with it, but not with batches, because other programs may have slowed them down.

        tokenmill history
        tokenmill history -m kimi.gguf --export measured.csv

    Parameters
    ----------
    model:
        Show only this model: a file, the name of a downloaded model, or part of a name in the history. [default: all]
    source:
        Show only measurements from this source. [default: all]
    last:
        Number of individual measurements to list.
    export:
        Write all selected measurements to this CSV file, regardless of --last.
    force:
        Overwrite an existing CSV file.
    """
    if last < 0:
        raise UsageError(f"--last must be at least 0 (got {last})")
    state = common.load_config().state_path
    batches = measurements.read(state, "stage", StageSpeed)
    rows = rows_of(speeds.read(state), load_history.read(state), batches)
    anything = bool(rows)
    if source is not None:
        rows = [row for row in rows if row.source == source]
    if model is not None:
        rows = _of_model(rows, model, common)
    if export is not None:
        with new_file(export, force=force) as file:
            file.write(_table(rows).encode())
        say(f"wrote {len(rows):,} measurements to {export}")
    if common.json:
        show_json(_document(rows, last))
    elif export is None and rows:
        show(*rendered(rows, last))
    elif export is None:
        say(_nothing(anything=anything))


def _of_model(rows: list[HistoryRow], model: str, common: Common) -> list[HistoryRow]:
    """The rows of a model, found by its identity if its files are on this machine, or else by its name."""
    place = locate(model, common.load_config())
    if Path(place).exists():
        known = identity_of(place)
        return [row for row in rows if row.model_id == known]
    wanted = model.casefold()
    return [row for row in rows if wanted in row.model.casefold()]


def _nothing(*, anything: bool) -> str:
    if anything:
        return "no matching measurements; run tokenmill history without options to see all"
    return "no measurements yet; tokenmill tune, bench and soak measure speeds, and every load is recorded"


def _cells(row: HistoryRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS}


def _table(rows: list[HistoryRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(_cells(row) for row in rows)
    return text.getvalue()


def _document(rows: list[HistoryRow], last: int) -> dict[str, Any]:
    first_error, last_error, count = errors(speeds_in(rows))
    return {
        "measurements": [_cells(row) for row in (rows[-last:] if last else [])],
        "trends": [
            {
                "model": trend.model,
                "machine": trend.machine,
                "quantity": trend.quantity,
                "unit": trend.unit,
                "count": len(trend.measured),
                "measured": jsonable(trend.measured),
                "last_measured": trend.last.measured,
                "last_predicted": trend.last.predicted,
                "predictions": trend.predictions,
                "median_error_first": trend.first_error,
                "median_error_last": trend.last_error,
            }
            for trend in trends(rows)
        ],
        "count": len(rows),
        "predictions": count,
        "median_error_first": first_error,
        "median_error_last": last_error,
    }
