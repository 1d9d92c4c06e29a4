"""Reads pending jobs from the store into the worker's buffer, in queue order.

The queue is a stream: `fetch` continues after the last job that was read, and `reread` starts from the beginning,
because jobs were added, reopened or released by another worker. Runs no jobs and records no outcomes.
"""

from collections.abc import Callable

from tokenmill.jobs.models import SortKey
from tokenmill.jobs.worker.async_store import AsyncStore
from tokenmill.jobs.worker.job_buffer import JobBuffer

_MIN_IDLE_S = 0.05  # minimum interval between reads of a local store while idle
_IDLE_FACTOR = 10  # a shared store is read at most once in this many times the duration of a read while idle
MIN_BUFFERED = 2  # jobs per slot in the buffer; below that, more jobs are read


class QueueReader:
    """The worker's position in the queue."""

    def __init__(
        self, store: AsyncStore, buffer: JobBuffer, *, slots: int, tick_s: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._buffer = buffer
        self._min_jobs = MIN_BUFFERED * slots
        self._tick_s = tick_s
        self._clock = clock
        self._position: SortKey | None = None  # None: the next read starts from the beginning
        self._may_have_more = True
        self._got_new = True  # the last read returned jobs that were not buffered
        self._total_at_start = 0  # number of stored jobs when the queue was last read from the beginning
        self._reread_s = float("-inf")  # when the queue was last reread without a known reason
        self._read_duration_s = 0.0  # of the last read

    async def fetch(self, limit: int) -> bool:
        """Read the next jobs into the buffer; returns whether the scheduler has something new to decide."""
        began_s = self._clock()
        if self._position is None:
            self._total_at_start = self._store.counts.total
        rows = await self._store.window(limit, again=self._position is None)
        self._read_duration_s = self._clock() - began_s
        self._position = rows[-1].key if rows else self._position
        known = all(row.id in self._buffer for row in rows)
        pending = self._buffer.scheduler.pending
        self._may_have_more = len(rows) >= limit
        self._buffer.add(rows, deadline_s=self._store.deadline_s, more=self._may_have_more)
        self._got_new = not known or self._buffer.scheduler.pending > pending
        return self._got_new if self._store.shared else bool(rows)

    def prefetch(self, *, busy: bool) -> None:
        """Prepare to read more jobs before the buffer is empty: the next shard, or lines added since the last read."""
        pending = self._buffer.scheduler.pending
        if self._may_have_more or pending > self._min_jobs:
            return
        if not self._store.shared:
            if self._store.counts.total > self._total_at_start:
                self.reread()
        elif self._got_new or (busy and self._clock() - self._reread_s >= self._tick_s):
            self._reread_s = self._clock()
            self.reread(from_start=not pending)

    def reread(self, *, from_start: bool = True) -> None:
        """Let the scheduler ask for more jobs, from the beginning of the queue or from the current position."""
        self._may_have_more = True
        self._got_new = False
        if from_start:
            self._position = None
        self._buffer.scheduler.reopen_stream()

    def idle_reread_due(self) -> bool:
        """Whether an idle worker should reread the queue now; if so, the next time is a pause later.

        In a shared store, other workers may have released jobs.
        """
        shared_pause_s = max(self._tick_s, _IDLE_FACTOR * self._read_duration_s)
        pause_s = shared_pause_s if self._store.shared else _MIN_IDLE_S
        due = self._clock() - self._reread_s >= pause_s
        if due:
            self._reread_s = self._clock()
        return due
