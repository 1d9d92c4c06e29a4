"""`tokenmill cancel`: nothing more of a batch."""

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
    store: str | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Cancel a batch: what is answered stays, what is not becomes an error line.

    A process that works on it is asked to, and does so within seconds.

    Parameters
    ----------
    batch:
        Its name or the beginning of it, or last.
    store:
        The folder of batches, or postgresql://...; default: store in the configuration, or batches in the state
        folder.
    """
    address = store_address(store, common.load_config())
    with StoreReader(address) as reader:
        found = find_batch(reader, batch)
    if found.cancelled_s is not None or found.finished:
        how = "is cancelled already" if found.cancelled_s is not None else "is done: there is nothing left to cancel"
        raise UsageError(f"{found.name} {how}", hint="tokenmill status shows the others")
    asked = _cancelled(address, found)
    if common.json:
        show_json({"batch": found.name, "asked": asked, "jobs": found.counts.pending + found.counts.running})
    elif asked:
        say(f"{found.name}: the process that works on it has been asked to cancel")
    else:
        say(f"{found.name} is cancelled; tokenmill results {found.name} gives what was answered")


def _cancelled(address: Address, batch: Batch) -> bool:
    """Cancel, or ask whoever works; whether it was asked. Runners on a server see it by themselves."""
    try:
        with Store(address) as store:
            store.cancel(batch.id)
    except StoreInUse:
        ask_to_cancel(address, batch.name)
        return True
    return False
