"""`tokenmill store`: checks and repairs the database of batches."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from rich.table import Table

from tokenmill.api.stores import store_address
from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.errors import StoreError
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.integrity import CheckReport, Damage
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite_errors import STORE_DAMAGED, start_over
from tokenmill.jobs.store.store import Store
from tokenmill.units import number_of

app = App(
    name="store",
    help="Check and repair the database of batches and answers.",
    group_parameters=Group.create_default_parameters("Options"),
)
_SHOWN_LINES = 10


@app.command
def check(
    *,
    repair: bool = False,
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Verify every answer in the store, and report damage.

    Runs SQLite's integrity check (PostgreSQL verifies its pages itself), compares every answer with its checksum, and
    checks that every finished job has its answer. Answers from versions without checksums are counted, but cannot be
    verified. Exit code 0: no damage; 1: damage was found, even if --repair removed it.

        tokenmill store check
        tokenmill store check --repair

    Parameters
    ----------
    repair:
        Remove damaged answers and requeue their jobs; the same `tokenmill run` command then computes them. No other
        process may use the store meanwhile, except on PostgreSQL.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    """
    address = store_address(store, common.load_config())
    report, requeued = _checked(address, repair=repair)
    if common.json:
        show_json(_document(address, report, requeued))
    else:
        _show(report)
        _advise(address, report, requeued)
    return 0 if report.clean else 1


def _checked(address: Address, *, repair: bool) -> tuple[CheckReport, int | None]:
    """The report, and the number of requeued jobs; None without --repair, or if the store cannot be opened."""
    try:
        if not repair:
            with StoreReader(address) as reader:
                return reader.check(), None
        with Store(address) as opened:
            report = opened.check()
            return report, opened.requeue(report.damage) if report.damage else 0
    except StoreError as error:
        if error.code != STORE_DAMAGED:
            raise
        return CheckReport((error.message,), Damage()), None  # too damaged to be opened


def _document(address: Address, report: CheckReport, requeued: int | None) -> dict[str, Any]:
    return {
        "store": str(address),
        "clean": report.clean,
        "problems": report.problems,
        "answers": report.answers,
        "answers_without_checksum": report.without_checksum,
        "damaged_answers": len(report.damage.answers),
        "batches": [
            {"batch": _name(report, batch), "damaged_lines": lines} for batch, lines in report.damage.lines().items()
        ],
        "requeued": requeued,
    }


def _show(report: CheckReport) -> None:
    old = f", {report.without_checksum:,} of them without a checksum" if report.without_checksum else ""
    table = Table.grid(padding=(0, 2))
    table.add_row("answers", f"{report.answers:,} read{old}, {len(report.damage.answers):,} damaged")
    for batch, lines in report.damage.lines().items():
        shown = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", ..." if len(lines) > _SHOWN_LINES else "")
        table.add_row(_name(report, batch), f"{number_of(len(lines), 'damaged line')}: {shown}")
    for problem in report.problems:
        table.add_row("database", problem)
    show(table)


def _advise(address: Address, report: CheckReport, requeued: int | None) -> None:
    if requeued:
        say(f"requeued {number_of(requeued, 'job')}; run the same tokenmill run commands again")
    elif report.damage and requeued is None:
        say("hint: tokenmill store check --repair requeues the damaged lines")
    if report.problems:
        hint = start_over(address) if isinstance(address, Path) else "restore a backup of the database"
        say(f"hint: the database itself is damaged; {hint}")


def _name(report: CheckReport, batch: int) -> str:
    return report.batches.get(batch, f"batch {batch}")
