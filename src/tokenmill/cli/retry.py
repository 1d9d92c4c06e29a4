"""`tokenmill retry`: what failed is to be done after all."""

from tokenmill.api.stores import find_batch, store_address
from tokenmill.cli.output import Common, say, show_json
from tokenmill.errors import StoreInUse, UsageError
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.retries import needed
from tokenmill.units import number_of


def retry(
    batch: str,
    /,
    *,
    failed: bool = False,
    cancelled: bool = False,
    store: str | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Make failed jobs pending again, with all their attempts; the same run command then works on them.

    Lines that could not be read stay as they are: mend the file and run it again.

    Parameters
    ----------
    batch:
        Its name or the beginning of it, or last.
    failed:
        Those that failed or were set aside.
    cancelled:
        Those that were cancelled, too; the batch is open again.
    store:
        The folder of batches, or postgresql://...; default: store in the configuration, or batches in the state
        folder.
    """
    if not failed and not cancelled:
        raise UsageError("choose which jobs to retry", hint="--failed, or --cancelled for a batch that was cancelled")
    with Store(store_address(store, common.load_config())) as opened:
        found = find_batch(opened, batch)
        if not opened.claim_output(found.id):
            # It would go on behind the lines of errors that it has written.
            raise StoreInUse(
                f"a runner writes the output of {found.name}",
                hint="wait until its tokenmill run has ended, or end it with Ctrl-C; then the same again",
            )
        codes = opened.failures_by_code(found.id)
        count = opened.retry(found.id, cancelled=cancelled)
    if common.json:
        show_json({"batch": found.name, "jobs": count})
        return
    if count:
        say(f"{number_of(count, 'job')} of {found.name} pending again; the same tokenmill run command does the work")
    else:
        say(f"{found.name} has no jobs to try again")
    for words in needed(codes):
        say(words)
