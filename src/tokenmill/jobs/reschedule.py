"""Another deadline or priority for a batch that is stored: whoever runs a file again may have changed their mind.

Lines that state their own keep it. What was given up because the old deadline had passed is taken up again under a
later one.
"""

from dataclasses import dataclass

from tokenmill.errors import RequestRefused
from tokenmill.jobs.line import body_of
from tokenmill.jobs.models import Batch, Submission
from tokenmill.jobs.store.store import Store
from tokenmill.storage.json_text import parse


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """What became of it."""

    batch: Batch
    deadline: bool = False  # is another
    priority: bool = False
    revived: int = 0  # jobs that were given up, and are pending again


def reschedule(store: Store, batch: Batch, how: Submission) -> Rescheduled:
    """Give a batch what a submission says; what it leaves open stays."""
    deadline = how.deadline_s is not None and how.deadline_s != batch.deadline_s
    priority = how.priority is not None and how.priority != batch.priority
    revived = 0
    if deadline and how.deadline_s is not None:
        revived = store.submissions.set_deadline(batch.id, how.deadline_s)
    if priority and how.priority is not None:
        store.submissions.set_priority(batch.id, how.priority, stated=_states_priority)
    if not deadline and not priority:
        return Rescheduled(batch)
    return Rescheduled(store.batch(batch.id), deadline, priority, revived)


def _states_priority(line: str) -> bool:
    """Whether a stored line has a priority of its own; called only where the word is in it."""
    try:
        return body_of(parse(line))[1].get("priority") is not None
    except (ValueError, RequestRefused):
        return False
