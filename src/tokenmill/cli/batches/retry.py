"""`tokenmill retry`: requeues failed or cancelled jobs."""

from typing import Annotated

from cyclopts import Parameter

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
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Requeue failed jobs with a new set of attempts; the same `tokenmill run` command then runs them.

    Invalid lines are not requeued: correct them in the job file and run it again.

        tokenmill retry last --failed

    Parameters
    ----------
    batch:
        Name of the batch, a prefix of it, or last for the one that was run last.
    failed:
        Requeue failed and quarantined jobs.
    cancelled:
        Also requeue cancelled jobs, and reopen a cancelled batch.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    """
    if not failed and not cancelled:
        raise UsageError("--failed or --cancelled is required", hint="use --cancelled to reopen a cancelled batch")
    with Store(store_address(store, common.load_config())) as opened:
        found = find_batch(opened, batch)
        if not opened.claim_output(found.id):
            # The runner would append the results after the error lines it has already written.
            raise StoreInUse(
                f"a running tokenmill run writes the output of {found.name}",
                hint="wait until it ends, or stop it with Ctrl-C; then retry again",
            )
        codes = opened.failures_by_code(found.id)
        count = opened.retry(found.id, cancelled=cancelled)
    if common.json:
        show_json({"batch": found.name, "jobs": count})
        return
    if count:
        say(f"requeued {number_of(count, 'job')} of {found.name}; run the same tokenmill run command again")
    else:
        say(f"{found.name} has no jobs to retry")
    for words in needed(codes):
        say(words)
