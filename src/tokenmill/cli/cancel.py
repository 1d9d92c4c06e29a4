"""`tokenmill cancel`: nothing more of a batch."""

from pathlib import Path

from tokenmill.cli.batches import find
from tokenmill.cli.job_options import store_folder
from tokenmill.cli.output import Common, say, show_json
from tokenmill.errors import StoreInUse, UsageError
from tokenmill.jobs.job import Batch
from tokenmill.jobs.reader import Reader
from tokenmill.jobs.store import Store, ask_to_cancel


def cancel(
    batch: str,
    /,
    *,
    store: Path | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Cancel a batch: what is answered stays, what is not becomes an error line.

    A process that works on it is asked to, and does so within seconds.

    Parameters
    ----------
    batch:
        Its name or the beginning of it, or last.
    store:
        The folder of batches; default: batches in the state folder.
    """
    folder = store_folder(store, common)
    with Reader(folder) as reader:
        found = find(reader, batch)
    if found.cancelled_s is not None or found.finished:
        how = "is cancelled already" if found.cancelled_s is not None else "is done: there is nothing left to cancel"
        raise UsageError(f"{found.name} {how}", hint="tokenmill status shows the others")
    asked = _cancelled(folder, found)
    if common.json:
        show_json({"batch": found.name, "asked": asked, "jobs": found.counts.pending + found.counts.running})
    elif asked:
        say(f"{found.name}: the process that works on it has been asked to cancel")
    else:
        say(f"{found.name} is cancelled; tokenmill results {found.name} gives what was answered")


def _cancelled(folder: Path, batch: Batch) -> bool:
    """Cancel, or ask whoever works; whether it was asked."""
    try:
        with Store(folder) as store:
            store.cancel(batch.id)
    except StoreInUse:
        ask_to_cancel(folder, batch.name)
        return True
    return False
