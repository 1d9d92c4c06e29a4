"""Changes the deadline or priority of a stored batch when its file is submitted again.

Lines with their own deadline or priority keep it. Jobs that expired become pending again if the new deadline is later.
"""

from dataclasses import dataclass

from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.line import body_of
from tokenmill.jobs.models import Batch, Submission
from tokenmill.jobs.store.store import Store
from tokenmill.storage.json_text import parse


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """A batch and the changes to it."""

    batch: Batch
    deadline: bool = False  # whether it was changed
    priority: bool = False
    revived: int = 0  # expired jobs that are pending again


def reschedule(store: Store, batch: Batch, how: Submission) -> Rescheduled:
    """Apply the deadline and priority of a submission to a batch, if they are set."""
    deadline = how.deadline_s is not None and how.deadline_s != batch.deadline_s
    priority = how.priority is not None and how.priority != batch.priority
    revived = 0
    if deadline and how.deadline_s is not None:
        revived = store.submissions.set_deadline(batch.id, how.deadline_s)
    if priority and how.priority is not None:
        store.submissions.set_priority(batch.id, how.priority, sets_priority=_sets_priority)
    if not deadline and not priority:
        return Rescheduled(batch)
    return Rescheduled(store.batch(batch.id), deadline, priority, revived)


def _sets_priority(line: str) -> bool:
    """Whether a stored line sets a priority."""
    try:
        return body_of(parse(line))[1].get("priority") is not None
    except (ValueError, RequestRefused):
        return False
