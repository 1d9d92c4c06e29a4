"""Pending jobs that are at hand, the most urgent first: by danger to a deadline, by priority, by batch, then by head.

Among batches of one priority the oldest goes first, as whoever sent it expects: a later one with the same heads would
make it wait for all its own answers, to save computing each head once more. Jobs in danger, and those that others of
their batch were preferred to for too long, stand in a tree of their own before all others, where they are in head order
as everywhere; the others of their group stay where they are. Time comes in as a number.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenmill.jobs.models import JobId
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.prefix_tree import Order, PrefixTree

BLIND_S = 3600.0  # a deadline nearer than this is in danger where nothing is known of the engine's speed
_MARGIN = 1.25  # expected times are this much too short, for all we know ...
_SLACK_S = 60.0  # ... and this much more
_LOOK_S = 1.0  # between two looks at all deadlines, at least ...
_FAR_S = 60.0  # ... and at most, while none is near
_PATIENCE = 4  # windows of jobs of its own batch that may pass before one that waits

Turn = tuple[int, int]
"""The negative of a priority, and a batch: the lowest goes first."""
Cost = Callable[[Pending], tuple[float, float] | None]
"""Seconds that a job takes of the engine, and seconds until its answer is complete; None: unknown."""


@dataclass(slots=True)
class _Line:
    """What waits for one turn."""

    tree: PrefixTree
    taken: int = 0  # jobs that were dispatched from here
    arrived: deque[tuple[int, int]] = field(default_factory=deque)  # (jobs taken when it came, job)


def _turn(record: Pending) -> Turn:
    return -record.priority, JobId.batch(record.job)


class Backlog:
    """Jobs that wait."""

    def __init__(self, *, final: Order, window: int) -> None:
        self.ended = False  # no more come: what is here is the rest of the run
        self._final: Order = final  # of the outermost groups, when all of them are known
        self._first: Order = "file" if final == "file" else "stream"
        self._patience = _PATIENCE * window
        self._urgent = PrefixTree("due")
        self._lines: dict[Turn, _Line] = {}
        self._homes: dict[int, PrefixTree] = {}  # of every job that is here
        self._dated: dict[int, Pending] = {}  # with a deadline, and not urgent yet
        self._looked_s: float | None = None
        self._pause_s = _LOOK_S

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, job: object) -> bool:
        return job in self._homes

    def trees(self) -> list[PrefixTree]:
        """Those with jobs, the most urgent first. Mutates nothing."""
        return [tree for tree in (self._urgent, *(self._lines[turn].tree for turn in sorted(self._lines))) if len(tree)]

    def add(self, records: Iterable[Pending]) -> None:
        """Take in jobs; mutates."""
        for record in records:
            line = self._lines.get(_turn(record))
            if line is None:
                line = self._lines[_turn(record)] = _Line(PrefixTree(self._first))
            line.tree.add(record)
            self._homes[record.job] = line.tree
            line.arrived.append((line.taken, record.job))
            if record.deadline_s is not None:
                self._dated[record.job] = record
                self._looked_s = None

    def reached(self, last: Pending | None, *, more: bool) -> None:
        """The stream has come to a job, and whether more follow; mutates the order of groups."""
        self.ended = not more
        for turn, line in self._lines.items():
            goes_on = more and (last is None or turn >= _turn(last))
            line.tree.open = last.head if goes_on and last is not None and turn == _turn(last) else None
            line.tree.order = self._first if goes_on else self._final

    def remove(self, job: int) -> Pending | None:
        """Take a job out if it is here; mutates."""
        tree = self._homes.pop(job, None)
        if tree is None:
            return None
        self._dated.pop(job, None)
        record = tree.remove(job)
        if not tree and tree is not self._urgent:
            del self._lines[_turn(record)]
        return record

    def take(self, job: int) -> None:
        """A job is dispatched; mutates: those passed over too often become urgent."""
        record = self.remove(job)
        line = self._lines.get(_turn(record)) if record is not None else None
        if line is None:
            return
        line.taken += 1
        while line.arrived and (line.arrived[0][1] not in self or line.taken - line.arrived[0][0] > self._patience):
            self._hurry(line.arrived.popleft()[1])

    def clock(self, now_s: float, cost: Cost) -> None:
        """Time has passed; mutates: jobs whose deadline is in danger become urgent.

        A job is in danger when it, and all that are due before it, would not be done in time if they were begun now.
        """
        if not self._dated or (self._looked_s is not None and 0 <= now_s - self._looked_s < self._pause_s):
            return
        self._looked_s = now_s
        slack_s = 4 * _FAR_S
        due = sorted(self._dated.values(), key=lambda record: record.deadline_s or 0.0)
        known = [cost(record) for record in self._urgent.records()]
        busy_s = sum(each[0] for each in known if each is not None)
        endangered = 0
        for number, record in enumerate(due, 1):
            left_s = (record.deadline_s or 0.0) - now_s
            takes = cost(record)
            busy_s += takes[0] if takes is not None else 0.0
            over_s = left_s - (BLIND_S if takes is None else _MARGIN * (busy_s + takes[1]) + _SLACK_S)
            if over_s <= 0:
                endangered = number
            else:
                slack_s = min(slack_s, over_s)
        # What is left over shrinks as time goes by, and faster when answers turn out longer than was thought.
        self._pause_s = min(_FAR_S, max(_LOOK_S, slack_s / 4))
        for record in due[:endangered]:
            self._hurry(record.job)

    def _hurry(self, job: int) -> None:
        """Put a job before those that are not urgent if it is here; mutates."""
        if job not in self._urgent and (record := self.remove(job)) is not None:
            self._urgent.add(record)
            self._homes[job] = self._urgent
