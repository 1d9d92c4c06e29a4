"""`tokenmill cancel`: cancels the unfinished jobs of a batch."""

from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.stores import find_batch, store_address
from tokenmill.cli.output import Common, say, show_json
from tokenmill.errors import StoreInUse, UsageError
from tokenmill.jobs.models import Batch
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store, ask_to_cancel


def cancel(
    batch: str,
    /,
    *,
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Cancel a batch. Finished answers are kept; unfinished jobs become error lines.

    If a process is working on the batch, it stops within seconds.

        tokenmill cancel last

    Parameters
    ----------
    batch:
        Name of the batch, a prefix of it, or last for the one that was run last.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    """
    address = store_address(store, common.load_config())
    with StoreReader(address) as reader:
        found = find_batch(reader, batch)
    if found.cancelled_s is not None or found.finished:
        how = "is already cancelled" if found.cancelled_s is not None else "is done; nothing left to cancel"
        raise UsageError(f"{found.name} {how}", hint="tokenmill status lists all batches")
    asked = _cancelled(address, found)
    if common.json:
        show_json({"batch": found.name, "asked": asked, "jobs": found.counts.pending + found.counts.running})
    elif asked:
        say(f"{found.name}: asked the process that works on it to cancel")
    else:
        say(f"cancelled {found.name}; to get its finished answers: tokenmill results {found.name}")


def _cancelled(address: Address, batch: Batch) -> bool:
    """Cancel the batch, or ask the process that works on it; return whether it was asked.

    Workers of a store on a server poll for cancelled batches.
    """
    try:
        with Store(address) as store:
            store.cancel(batch.id)
    except StoreInUse:
        ask_to_cancel(address, batch.name)
        return True
    return False
