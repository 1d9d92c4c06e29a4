"""Pending jobs in memory, ordered by deadline risk, priority, batch and prefix.

Among batches of equal priority the oldest goes first. Batches do not interleave even if they share prefixes: the older
one would finish later, to save one computation per prefix. Jobs whose deadline is at risk, and jobs that were passed
over for too long, move to an urgent tree that precedes all others and is ordered by prefix too; the rest of their group
stays where it is. Pure: time is passed in as a number.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenmill.jobs.models import JobId
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.prefix_tree import Order, PrefixTree

UNKNOWN_SPEED_RISK_S = 3600.0  # a deadline nearer than this is at risk if the engine's speed is unknown
_MARGIN = 1.25  # expected times are multiplied by this ...
_SLACK_S = 60.0  # ... and this is added
_MIN_CHECK_S = 1.0  # minimum interval between checks of all deadlines ...
_MAX_CHECK_S = 60.0  # ... and maximum, while no deadline is near
_MAX_PASSED_WINDOWS = 4  # windows of jobs of the same batch that may run before a waiting job

Turn = tuple[int, int]
"""(negative priority, batch); the lowest goes first."""
Cost = Callable[[Pending], tuple[float, float] | None]
"""Engine seconds that a job takes, and seconds until its answer is complete; None if unknown."""


@dataclass(slots=True)
class _Queue:
    """The pending jobs of one priority and batch."""

    tree: PrefixTree
    taken: int = 0  # jobs dispatched from this queue
    arrived: deque[tuple[int, int]] = field(default_factory=deque)  # (`taken` when the job arrived, job)


def _turn(record: Pending) -> Turn:
    return -record.priority, JobId.batch(record.job)


class Backlog:
    """All pending jobs in memory."""

    def __init__(self, *, final: Order, window: int) -> None:
        self.ended = False  # the job stream has ended: no more jobs will be added
        self._final: Order = final  # order of the outermost groups once all jobs are known
        self._first: Order = "file" if final == "file" else "stream"
        self._max_passed = _MAX_PASSED_WINDOWS * window
        self._urgent = PrefixTree("due")
        self._queues: dict[Turn, _Queue] = {}
        self._trees: dict[int, PrefixTree] = {}  # the tree of each pending job
        self._with_deadline: dict[int, Pending] = {}  # jobs with a deadline that are not urgent yet
        self._checked_s: float | None = None
        self._check_interval_s = _MIN_CHECK_S

    def __len__(self) -> int:
        return len(self._trees)

    def __contains__(self, job: object) -> bool:
        return job in self._trees

    def trees(self) -> list[PrefixTree]:
        """The non-empty trees, the most urgent first."""
        return [
            tree for tree in (self._urgent, *(self._queues[turn].tree for turn in sorted(self._queues))) if len(tree)
        ]

    def add(self, records: Iterable[Pending]) -> None:
        """Add pending jobs."""
        for record in records:
            queue = self._queues.get(_turn(record))
            if queue is None:
                queue = self._queues[_turn(record)] = _Queue(PrefixTree(self._first))
            queue.tree.add(record)
            self._trees[record.job] = queue.tree
            queue.arrived.append((queue.taken, record.job))
            if record.deadline_s is not None:
                self._with_deadline[record.job] = record
                self._checked_s = None

    def stream_read(self, last: Pending | None, *, more: bool) -> None:
        """Record that the job stream was read up to `last`, and whether more jobs follow; this may reorder groups."""
        self.ended = not more
        for turn, queue in self._queues.items():
            continues = more and (last is None or turn >= _turn(last))
            queue.tree.open = last.prefix_key if continues and last is not None and turn == _turn(last) else None
            queue.tree.order = self._first if continues else self._final

    def remove(self, job: int) -> Pending | None:
        """Remove and return a job; None if it is not pending."""
        tree = self._trees.pop(job, None)
        if tree is None:
            return None
        self._with_deadline.pop(job, None)
        record = tree.remove(job)
        if not tree and tree is not self._urgent:
            del self._queues[_turn(record)]
        return record

    def take(self, job: int) -> None:
        """Remove a dispatched job, and make jobs urgent that were passed over for too long."""
        record = self.remove(job)
        queue = self._queues.get(_turn(record)) if record is not None else None
        if queue is None:
            return
        queue.taken += 1
        while queue.arrived and (
            queue.arrived[0][1] not in self or queue.taken - queue.arrived[0][0] > self._max_passed
        ):
            self._make_urgent(queue.arrived.popleft()[1])

    def advance_clock(self, now_s: float, cost: Cost) -> None:
        """Advance the time, and make jobs urgent whose deadline is at risk.

        A deadline is at risk if the job would miss it even if all jobs due before it, and then the job, started now.
        """
        if not self._with_deadline or (
            self._checked_s is not None and 0 <= now_s - self._checked_s < self._check_interval_s
        ):
            return
        self._checked_s = now_s
        slack_s = 4 * _MAX_CHECK_S
        due = sorted(self._with_deadline.values(), key=lambda record: record.deadline_s or 0.0)
        known = [cost(record) for record in self._urgent.records()]
        busy_s = sum(each[0] for each in known if each is not None)
        endangered = 0
        for number, record in enumerate(due, 1):
            left_s = (record.deadline_s or 0.0) - now_s
            takes = cost(record)
            busy_s += takes[0] if takes is not None else 0.0
            over_s = left_s - (UNKNOWN_SPEED_RISK_S if takes is None else _MARGIN * (busy_s + takes[1]) + _SLACK_S)
            if over_s <= 0:
                endangered = number
            else:
                slack_s = min(slack_s, over_s)
        # The slack shrinks with time, and faster if answers are longer than expected.
        self._check_interval_s = min(_MAX_CHECK_S, max(_MIN_CHECK_S, slack_s / 4))
        for record in due[:endangered]:
            self._make_urgent(record.job)

    def _make_urgent(self, job: int) -> None:
        """Move a pending job to the urgent tree."""
        if job not in self._urgent and (record := self.remove(job)) is not None:
            self._urgent.add(record)
            self._trees[job] = self._urgent
