"""The durable half of the jobs room: batches, jobs and answers, written to by one process or, on a server, by several.

What is acknowledged (a sealed batch, a committed answer) survives the end of the process and of the machine. An answer
is stored once for its identity and never changes. Which job runs when, and on what, is not decided here; nor is the
form of an answer known. Methods may be called from several threads.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from tokenmill.errors import StoreError
from tokenmill.jobs.models import Failure, FinishedJob, Job, JobId, JobOutcome, Started, State
from tokenmill.jobs.sharding.allocator import LocalShards, ShardView, WorkerSpec
from tokenmill.jobs.sharding.coordination import Coordinator
from tokenmill.jobs.sharding.reader import ShardReader
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.backend import DatabaseBackend, Shutdown
from tokenmill.jobs.store.integrity import Damage, affected, checksum
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import Database
from tokenmill.jobs.store.submissions import Submissions
from tokenmill.units import number_of

MOST_DEATHS = 2
_PAGE_RESULTS = 256
_LOGGED_LINES = 10
_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(method: "Callable[Concatenate[Store, P], T]") -> "Callable[Concatenate[Store, P], T]":
    """What is at work and what is held change with the tables, for one thread after another.

    They change behind the transaction, so that it can be done again.
    """

    @wraps(method)
    def alone(self: "Store", /, *args: P.args, **named: P.kwargs) -> T:
        with self._turn:
            return self._database.whole(lambda: method(self, *args, **named))

    return alone


class Store(StoreReader):
    """An open store of batches that this process works on; what one that is gone left running is pending again."""

    def __init__(
        self, address: Address, *, clock: Callable[[], float] | None = None, shutdown: Shutdown | None = None
    ) -> None:
        super().__init__(address, clock=clock, mode="work", shutdown=shutdown)
        self._turn = threading.RLock()
        self._at_work: dict[int, bytes] = {}  # running jobs of this process and their identities
        self._held: dict[bytes, dict[int, None]] = {}  # jobs that wait for an equal one that runs, in their order
        self._standing = _coordinator(self._database, self._at_work.keys)
        self.submissions = Submissions(self._database, self._standing, self)
        self._recover()

    def close(self) -> None:
        """Let go of it; on a server, what is at work here is pending again."""
        try:
            self._standing.leave()
        finally:
            super().close()

    def tend(self) -> None:
        """From time to time, while jobs run: this process lives."""
        self._standing.tend()

    def claim_output(self, batch: int) -> bool:
        """Whether this process may write the output of a batch; of several one may, until it closes the store."""
        return self._standing.claim_output(batch)

    def shards(self, slots: int) -> ShardView:
        """The pending jobs that a worker of this process may take: all, or its shards where others use the store."""
        return self._standing.shards(self, slots)

    def announce(self, spec: WorkerSpec) -> None:
        """Let other workers know what this process will do once its engine is loaded."""
        shards = self.shards(1)
        shards.ready(spec, 1)
        shards.close()  # it takes no jobs yet; what was announced holds until it leaves the store

    def local_shards(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        coming: Callable[[], Iterable[int | None]] = tuple,
    ) -> LocalShards:
        """A table for several workers of this process; see `LocalShards`."""
        return LocalShards(self, ShardReader(self, self._database), clock=clock, coming=coming)

    # Working.

    @_in_turn
    def start(self, jobs: Iterable[int]) -> Started:
        """Mark jobs as running. Those with an answer are done instead; those whose equal runs are held for it.

        Jobs that are not pending any more, or that another runner takes in this moment, are in none of the lists. What
        is held for another runner's job is not told when that ends: start it again from time to time.
        """
        running = dict[bytes, Job]()
        answered = list[JobOutcome]()
        held = list[tuple[bytes | None, int]]()
        here = set(self._at_work.values())
        with self._database.writing(durable=False, deferred=True):
            self._standing.stand()
            for number in jobs:
                row = self._database.run("take", job=number).fetchone()
                job = self._job(row) if row else None
                if job is None or job.identity is None:
                    continue
                if self._database.run("answer_job", job=number).rowcount:
                    self._database.run("count_reused", batch=job.batch, jobs=1)
                    answered.append(JobOutcome(number, State.DONE, reused=True))
                elif job.identity in here:
                    held.append((job.identity, number))
                elif self._standing.busy(job.identity):
                    held.append((None, number))
                else:
                    self._database.run("start", job=number, runner=self._standing.id)
                    here.add(job.identity)
                    running[job.identity] = job
        self._at_work.update((job.id, identity) for identity, job in running.items())
        for identity, number in held:
            if identity is not None:
                self._held.setdefault(identity, {})[number] = None
        return Started(tuple(running.values()), tuple(answered), tuple(number for _, number in held))

    @_in_turn
    def commit(self, finished: Sequence[FinishedJob]) -> tuple[JobOutcome, ...]:
        """Store answers in one transaction, on the disk when this returns; their jobs and held equals are done.

        An identity that has an answer keeps it: committing again changes nothing. The answer of a job that was
        cancelled meanwhile is kept for others: its batch has paid for it, and is not done with it.
        """
        outcomes = list[JobOutcome]()
        with self._database.writing(durable=True):
            for item in finished:
                values = {"prompt_tokens": item.prompt_tokens, "completion_tokens": item.completion_tokens}
                new = self._database.run(
                    "add_answer", job=item.job, body=item.body, checksum=checksum(item.body), now=self.now_s(), **values
                ).rowcount
                computed = 0
                for job in (item.job, *self._held.get(self._at_work.get(item.job, b""), ())):
                    reused = job != item.job or not new
                    if self._database.run("answer_job", job=job).rowcount:
                        outcomes.append(JobOutcome(job, State.DONE, reused=reused))
                        computed += not reused
                        if reused:
                            self._database.run("count_reused", batch=JobId.batch(job), jobs=1)
                if new:
                    self._database.run(
                        "add_totals",
                        batch=JobId.batch(item.job),
                        engine_s=item.engine_s,
                        computed=computed,
                        cached_tokens=item.cached_tokens or 0,
                        **values,
                    )
        for item in finished:
            self._held.pop(self._at_work.pop(item.job, b""), None)
        return tuple(outcomes)

    @_in_turn
    def fail(self, job: int, failure: Failure, *, retry_at_s: float | None = None) -> tuple[JobOutcome, ...]:
        """No answer: for good, or to be tried again from a time on. Held equals are free again."""
        with self._database.writing(durable=retry_at_s is None):
            # Another runner's by now, if the lease here was over for a while, it is not ours to change.
            values = {"job": job, "code": failure.code, "message": failure.message, "runner": self._standing.id}
            if retry_at_s is None:
                changed = self._database.run("fail", **values).rowcount
            else:
                changed = self._database.run("retry_later", not_before=retry_at_s, **values).rowcount
        state = State.FAILED if retry_at_s is None else State.PENDING
        return (*((JobOutcome(job, state),) if changed else ()), *self._freed([job]))

    @_in_turn
    def died(
        self, jobs: Iterable[int], failure: Failure, *, retry_at_s: float, most_deaths: int = MOST_DEATHS
    ) -> tuple[JobOutcome, ...]:
        """The engine died with these at work: to be tried again, or set aside when it was once too often."""
        outcomes = list[JobOutcome]()
        suspects = list(jobs)
        with self._database.writing(durable=True):
            for job in suspects:
                values = {
                    "code": failure.code,
                    "message": failure.message,
                    "runner": self._standing.id,
                    "not_before": retry_at_s,
                }
                if row := self._database.run("died", job=job, most=most_deaths, **values).fetchone():
                    outcomes.append(JobOutcome(job, State(row[0])))
        return (*outcomes, *self._freed(suspects))

    @_in_turn
    def release(self, jobs: Iterable[int]) -> tuple[JobOutcome, ...]:
        """Jobs that were put back unfinished; this was no attempt."""
        released = list(jobs)
        with self._database.writing(durable=False):
            for job in released:
                self._database.run("release", job=job, runner=self._standing.id)
        return self._freed(released)

    @_in_turn
    def cancel(self, batch: int) -> int:
        """Nothing more of this batch is to be done; how many jobs that ends.

        What runs is to be stopped and released by who runs it; an answer that comes all the same is kept.
        """
        with self._database.writing(durable=True):
            count = self._database.run("cancel_waiting", batch=batch).rowcount
            count += self._database.run("cancel_running", batch=batch).rowcount
            self._database.run("cancel_batch", batch=batch, now=self.now_s())
        return count

    def asked_to_cancel(self) -> list[int]:
        """Batches that other processes asked to cancel, or cancelled while jobs of theirs run here."""
        asked = [row[0] for row in self._database.all("asked")]
        return [*asked, *(self._standing.cancelled(list(self._at_work)) - set(asked))]

    @_in_turn
    def retry(self, batch: int, *, cancelled: bool = False) -> int:
        """Failed jobs and those set aside are pending again, bad lines excepted; how many.

        An output is to be opened after this, not before: their lines are in it.
        """
        with self._database.writing(durable=True):
            count = self._database.run("retry_failed", batch=batch).rowcount
            if cancelled:
                span = JobId.span(batch)
                count += self._database.run("retry_cancelled", **span).rowcount
                self._database.run("reopen_batch", batch=batch)
        return count

    @_in_turn
    def expire(self) -> int:
        """Pending jobs whose deadline, or whose batch's, has passed fail; how many."""
        now = self.now_s()
        with self._database.writing(durable=True):
            count = len(self._database.run("expire_jobs", now=now).fetchall())
            for (batch,) in self._database.run("overdue_batches", now=now).fetchall():
                count += self._database.run("expire_batch", batch=batch).rowcount
        return count

    def requeue_damaged(self, batch: int) -> int:
        """Make jobs of a batch with a damaged answer pending again, and those of other batches that share it.

        Returns how many of this batch; each is logged. Reads every answer of the batch.
        """
        damaged = set[int]()
        after = 0
        while page := self.results(batch, after, _PAGE_RESULTS):
            after = page[-1].number
            damaged |= {result.damaged_answer for result in page if result.damaged_answer is not None}
        if not damaged:
            return 0
        damage = affected(self._database, damaged - {0})
        self.requeue(damage)
        lines = damage.lines().get(batch, [])
        _log.warning(
            "%s: the stored answers of %s are damaged and are computed again: %s%s",
            self.batch(batch).name,
            number_of(len(lines), "line"),
            ", ".join(map(str, lines[:_LOGGED_LINES])),
            ", ..." if len(lines) > _LOGGED_LINES else "",
        )
        return len(lines)

    @_in_turn
    def requeue(self, damage: Damage) -> int:
        """Remove damaged answers and make their jobs pending again; how many jobs."""
        with self._database.writing(durable=True):
            for answer in damage.answers:
                self._database.run("forget_answer", answer=answer)
            return sum(self._database.run("requeue", job=job).rowcount for job in damage.jobs)

    def flush(self) -> None:
        """Let other processes see which jobs were started; `commit` and others do so by themselves."""
        self._database.flush()

    @property
    def unflushed(self) -> bool:
        """Whether `flush` has something to do."""
        return self._database.deferred

    def _recover(self) -> None:
        """What ran when a process ended did not finish; halves of batches that nobody can find again go."""
        try:
            self._standing.recover()
            for (batch,) in self._database.all("doomed"):
                self.submissions.forget(batch)
        except StoreError:
            with suppress(StoreError):
                self.close()
            raise

    def _freed(self, jobs: Iterable[int]) -> tuple[JobOutcome, ...]:
        held = [job for ended in jobs for job in self._held.pop(self._at_work.pop(ended, b""), ())]
        return tuple(JobOutcome(job, State.PENDING) for job in held)


def ask_to_cancel(address: Address, name: str, *, clock: Callable[[], float] | None = None) -> None:
    """Leave word for the process that works: this batch is to be cancelled."""
    with StoreReader(address, clock=clock, mode="ask") as reader:
        batch = reader.named(name)
        reader.ask_cancel(batch.id)


def _coordinator(database: DatabaseBackend, running: Callable[[], Collection[int]]) -> Coordinator:
    """The coordinator of an open database; `running` returns the jobs that run in this process."""
    if isinstance(database, Database):
        return Coordinator(database)
    from tokenmill.jobs.sharding.leases import leased  # noqa: PLC0415  its driver is an extra

    return leased(database, running)
