"""The durable store of batches, jobs and answers, written by one process or, on a server, by several.

Sealed batches and committed answers survive a crash of the process or the machine. An answer is stored once per
identity and never changes. The store neither schedules jobs nor interprets answers. Methods may be called from several
threads.
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
from tokenmill.jobs.sharding.coordination import Coordinator
from tokenmill.jobs.sharding.local_shards import LocalShards
from tokenmill.jobs.sharding.reader import ShardReader
from tokenmill.jobs.sharding.view import ShardView, WorkerSpec
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.backend import DatabaseBackend, Shutdown
from tokenmill.jobs.store.integrity import Damage, affected, checksum
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import Database
from tokenmill.jobs.store.submissions import Submissions
from tokenmill.units import number_of

MAX_CRASHES = 2
_PAGE_RESULTS = 256
_LOGGED_LINES = 10
_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _serialized(method: "Callable[Concatenate[Store, P], T]") -> "Callable[Concatenate[Store, P], T]":
    """Serialize calls of a method, and repeat its transaction after conflicts.

    Methods change `_running` and `_held` only after the transaction, so that it can be repeated.
    """

    @wraps(method)
    def alone(self: "Store", /, *args: P.args, **named: P.kwargs) -> T:
        with self._lock:
            return self._database.transaction(lambda: method(self, *args, **named))

    return alone


class Store(StoreReader):
    """An open store whose jobs this process runs. Opening it requeues jobs that a dead process left running."""

    def __init__(
        self, address: Address, *, clock: Callable[[], float] | None = None, shutdown: Shutdown | None = None
    ) -> None:
        super().__init__(address, clock=clock, mode="work", shutdown=shutdown)
        self._lock = threading.RLock()
        self._running: dict[int, bytes] = {}  # running jobs of this process and their identities
        self._held: dict[bytes, dict[int, None]] = {}  # jobs that wait for an equal running job, in order
        self._coordinator = _coordinator(self._database, self._running.keys)
        self.submissions = Submissions(self._database, self._coordinator, self)
        self._recover()

    def close(self) -> None:
        """Close the store; on a server, running jobs of this process become pending."""
        try:
            self._coordinator.leave()
        finally:
            super().close()

    def renew_lease(self) -> None:
        """Renew the lease; must be called periodically while jobs run."""
        self._coordinator.renew_lease()

    def claim_output(self, batch: int) -> bool:
        """Claim the output of a batch until the store is closed; returns whether this process has the claim."""
        return self._coordinator.claim_output(batch)

    def shards(self, slots: int) -> ShardView:
        """The pending jobs for a worker of this process: all, or its shards if other processes use the store."""
        return self._coordinator.shards(self, slots)

    def announce(self, spec: WorkerSpec) -> None:
        """Announce to other workers which jobs this process will run once its engine is loaded."""
        shards = self.shards(1)
        shards.register(spec, 1)
        shards.close()  # it takes no jobs yet; the announcement stays until the store is closed

    def local_shards(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        expected: Callable[[], Iterable[int | None]] = tuple,
    ) -> LocalShards:
        """A shard table for several workers of this process; see `LocalShards`."""
        return LocalShards(self, ShardReader(self, self._database), clock=clock, expected=expected)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    @_serialized
    def start(self, jobs: Iterable[int]) -> Started:
        """Mark jobs as running. Jobs whose request has an answer are done; those whose request is running are held.

        Jobs that are no longer pending, or that another process is starting, are in none of the lists. Jobs held for a
        job of another process must be started again periodically, because their release is not reported.
        """
        running = dict[bytes, Job]()
        answered = list[JobOutcome]()
        held = list[tuple[bytes | None, int]]()
        here = set(self._running.values())
        with self._database.writing(durable=False, deferred=True):
            self._coordinator.extend_lease()
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
                elif self._coordinator.busy(job.identity):
                    held.append((None, number))
                else:
                    self._database.run("start", job=number, runner=self._coordinator.id)
                    here.add(job.identity)
                    running[job.identity] = job
        self._running.update((job.id, identity) for identity, job in running.items())
        for identity, number in held:
            if identity is not None:
                self._held.setdefault(identity, {})[number] = None
        return Started(tuple(running.values()), tuple(answered), tuple(number for _, number in held))

    @_serialized
    def commit(self, finished: Sequence[FinishedJob]) -> tuple[JobOutcome, ...]:
        """Store answers in one transaction, on disk when this returns. Their jobs, and jobs held for them, are done.

        An existing answer is kept: committing again changes nothing. The answer of a job that was cancelled meanwhile
        is stored for other jobs; its cost counts for the batch, but the job stays cancelled.
        """
        outcomes = list[JobOutcome]()
        with self._database.writing(durable=True):
            for item in finished:
                values = {"prompt_tokens": item.prompt_tokens, "completion_tokens": item.completion_tokens}
                new = self._database.run(
                    "add_answer", job=item.job, body=item.body, checksum=checksum(item.body), now=self.now_s(), **values
                ).rowcount
                computed = 0
                for job in (item.job, *self._held.get(self._running.get(item.job, b""), ())):
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
            self._held.pop(self._running.pop(item.job, b""), None)
        return tuple(outcomes)

    @_serialized
    def fail(self, job: int, failure: Failure, *, retry_at_s: float | None = None) -> tuple[JobOutcome, ...]:
        """Fail a job permanently, or until `retry_at_s`. Jobs held for it are released."""
        with self._database.writing(durable=retry_at_s is None):
            # If the lease of this process has expired, the job may belong to another process and stays unchanged.
            values = {"job": job, "code": failure.code, "message": failure.message, "runner": self._coordinator.id}
            if retry_at_s is None:
                changed = self._database.run("fail", **values).rowcount
            else:
                changed = self._database.run("retry_later", not_before=retry_at_s, **values).rowcount
        state = State.FAILED if retry_at_s is None else State.PENDING
        return (*((JobOutcome(job, state),) if changed else ()), *self._release_held([job]))

    @_serialized
    def record_crash(
        self, jobs: Iterable[int], failure: Failure, *, retry_at_s: float, max_crashes: int = MAX_CRASHES
    ) -> tuple[JobOutcome, ...]:
        """Count an engine crash against jobs that were in flight; after `max_crashes` a job is quarantined."""
        outcomes = list[JobOutcome]()
        suspects = list(jobs)
        with self._database.writing(durable=True):
            for job in suspects:
                values = {
                    "code": failure.code,
                    "message": failure.message,
                    "runner": self._coordinator.id,
                    "not_before": retry_at_s,
                }
                if row := self._database.run("record_crash", job=job, most=max_crashes, **values).fetchone():
                    outcomes.append(JobOutcome(job, State(row[0])))
        return (*outcomes, *self._release_held(suspects))

    @_serialized
    def release(self, jobs: Iterable[int]) -> tuple[JobOutcome, ...]:
        """Return unfinished jobs to the queue without counting an attempt."""
        released = list(jobs)
        with self._database.writing(durable=False):
            for job in released:
                self._database.run("release", job=job, runner=self._coordinator.id)
        return self._release_held(released)

    @_serialized
    def cancel(self, batch: int) -> int:
        """Cancel a batch; returns the number of cancelled jobs.

        The worker must stop and release running jobs; an answer that arrives anyway is stored.
        """
        with self._database.writing(durable=True):
            count = self._database.run("cancel_waiting", batch=batch).rowcount
            count += self._database.run("cancel_running", batch=batch).rowcount
            self._database.run("cancel_batch", batch=batch, now=self.now_s())
        return count

    def cancel_requests(self) -> list[int]:
        """Batches whose cancellation was requested, or that were cancelled by others while their jobs run here."""
        asked = [row[0] for row in self._database.all("cancel_requests")]
        return [*asked, *(self._coordinator.cancelled(list(self._running)) - set(asked))]

    @_serialized
    def retry(self, batch: int, *, cancelled: bool = False) -> int:
        """Make failed and quarantined jobs pending again, except invalid lines; returns their number.

        Must be called before the output is opened, which then removes their error lines.
        """
        with self._database.writing(durable=True):
            count = self._database.run("retry_failed", batch=batch).rowcount
            if cancelled:
                span = JobId.span(batch)
                count += self._database.run("retry_cancelled", **span).rowcount
                self._database.run("reopen_batch", batch=batch)
        return count

    @_serialized
    def expire(self) -> int:
        """Fail pending jobs whose deadline, or whose batch's deadline, has passed; returns their number."""
        now = self.now_s()
        with self._database.writing(durable=True):
            count = len(self._database.run("expire_jobs", now=now).fetchall())
            for (batch,) in self._database.run("overdue_batches", now=now).fetchall():
                count += self._database.run("expire_batch", batch=batch).rowcount
        return count

    def requeue_damaged(self, batch: int) -> int:
        """Make jobs with a damaged answer pending again: those of a batch, and those of other batches that share it.

        Returns the number of affected jobs of the batch and logs their lines. Reads every answer of the batch.
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
            "%s: the stored answers of %s are damaged and will be recomputed: %s%s",
            self.batch(batch).name,
            number_of(len(lines), "line"),
            ", ".join(map(str, lines[:_LOGGED_LINES])),
            ", ..." if len(lines) > _LOGGED_LINES else "",
        )
        return len(lines)

    @_serialized
    def requeue(self, damage: Damage) -> int:
        """Remove damaged answers and make their jobs pending again; returns the number of jobs."""
        with self._database.writing(durable=True):
            for answer in damage.answers:
                self._database.run("forget_answer", answer=answer)
            return sum(self._database.run("requeue", job=job).rowcount for job in damage.jobs)

    def flush(self) -> None:
        """Make started jobs visible to other processes; other writes do this too."""
        self._database.flush()

    @property
    def unflushed(self) -> bool:
        """Whether there are changes for `flush`."""
        return self._database.deferred

    def _recover(self) -> None:
        """Requeue jobs that ended processes left running, and finish interrupted removals of batches."""
        try:
            self._coordinator.recover()
            for (batch,) in self._database.all("removed_batches"):
                self.submissions.forget(batch)
        except StoreError:
            with suppress(StoreError):
                self.close()
            raise

    def _release_held(self, jobs: Iterable[int]) -> tuple[JobOutcome, ...]:
        held = [job for ended in jobs for job in self._held.pop(self._running.pop(ended, b""), ())]
        return tuple(JobOutcome(job, State.PENDING) for job in held)


def ask_to_cancel(address: Address, name: str, *, clock: Callable[[], float] | None = None) -> None:
    """Request the cancellation of a batch from the process that runs it."""
    with StoreReader(address, clock=clock, mode="ask") as reader:
        batch = reader.named(name)
        reader.ask_cancel(batch.id)


def _coordinator(database: DatabaseBackend, running: Callable[[], Collection[int]]) -> Coordinator:
    """The coordinator of an open database; `running` returns the jobs that run in this process."""
    if isinstance(database, Database):
        return Coordinator(database)
    from tokenmill.jobs.sharding.worker_lease import leased  # noqa: PLC0415  its driver is an extra

    return leased(database, running)
