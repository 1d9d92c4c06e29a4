"""Runs the same batches on several engines in one process, each with its own worker and shards.

        members --> one worker each --> the store, which assigns shards to workers
                                          |
        the pool's own AsyncStore  <------+   writes the output files, independently of members that join and leave

Members may join at any time. If an engine fails permanently, its jobs return to the queue for the other members. The
pool ends when every batch is finished, or when no member is left and none can join. The caller starts and closes the
engines.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.async_store import AsyncStore
from tokenmill.jobs.worker.loop import RESUME_HINT, WorkerResult, WorkOptions, WorkTask, run_worker
from tokenmill.jobs.worker.pool_summary import combined_report, combined_snapshot
from tokenmill.jobs.worker.progress import Failed, RunEnd, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import Miss
from tokenmill.jobs.worker.stats import OnSnapshot

_GRACE_TICKS = 5  # time for workers to notice the end by themselves; those that wait for their engine do not


class PoolMember(NamedTuple):
    """A started engine."""

    name: str
    engine: Engine
    shape: EngineShape


PoolMembers = Iterable[PoolMember] | AsyncIterable[PoolMember] | asyncio.Queue[PoolMember | None]
"""The members: all of them, or as they become ready; None marks the end of a queue."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The result of one member."""

    name: str
    report: RunReport | None  # None: its engine failed before it reported
    lost: str | None  # the permanent failure of its engine; None if there was none


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The result of the pool."""

    total: RunReport
    members: tuple[MemberReport, ...]  # in the order in which they joined


async def run_pool(
    store: Store,
    batches: Sequence[Batch],
    members: PoolMembers,
    *,
    outputs: Mapping[int, Output] | None = None,
    options: WorkOptions | None = None,
    stop: asyncio.Event | None = None,
    on_snapshot: OnSnapshot | None = None,
    clock: Callable[[], float] | None = None,
    on_miss: Callable[[Miss], None] = lambda _: None,
    expected: Callable[[], Iterable[int | None]] = tuple,
) -> PoolReport:
    """Run the batches on all members until every job has an outcome, or until `stop` is set.

    A job that is too long for one member is left to members with a larger context; it fails if no present or expected
    member can run it. `expected` returns the context sizes, in tokens, of members that have not joined yet; None:
    unknown. Members with the same name get a numbered suffix.

    Raises EngineError when no member is left and none can join, and StoreError and output errors as `work` does. Jobs
    in flight have returned to the queue by then.
    """
    settings = options or WorkOptions()
    async_store = AsyncStore(
        store, batches, outputs or {}, clock=clock or store.now_s, max_crashes=settings.max_crashes
    )
    table = store.local_shards(expected=expected)

    def start(member: PoolMember, halt: asyncio.Event, on_snapshot: OnSnapshot) -> "asyncio.Task[WorkerResult]":
        task = WorkTask(
            store,
            batches,
            member.engine,
            member.shape,
            options=settings,
            stop=halt,
            on_snapshot=on_snapshot,
            clock=clock,
            on_miss=on_miss,
            shards=table.add(member.name, member.shape.width),
        )
        return asyncio.create_task(run_worker(task))

    pool = _Pool(async_store, start, on_snapshot or (lambda _: None), settings.tick_s)
    return await pool.run(members, stop or asyncio.Event())


_Start = Callable[[PoolMember, asyncio.Event, OnSnapshot], "asyncio.Task[WorkerResult]"]


class _Pool:
    def __init__(self, store: AsyncStore, start: _Start, on_snapshot: OnSnapshot, tick_s: float) -> None:
        self._store = store
        self._start = start
        self._on_snapshot = on_snapshot
        self._tick_s = tick_s
        self._tasks: dict[str, asyncio.Task[WorkerResult]] = {}
        self._names: list[str] = []  # in the order in which they joined
        self._ended: dict[str, MemberReport] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._failed: Failed | None = None
        self._halt = asyncio.Event()
        self._changed = asyncio.Event()
        self._last_error: EngineError | None = None  # that ended the last member
        self._joining_error: TokenmillError | None = None  # that prevents members from joining
        self._loop_s = asyncio.get_running_loop().time
        self._started_s = self._loop_s()

    async def run(self, members: PoolMembers, stop: asyncio.Event) -> PoolReport:
        """Run until all jobs are done, or `stop` is set."""
        joining = asyncio.create_task(self._accept(members))
        stopping = asyncio.create_task(self._await_stop(stop))
        try:
            await self._work(joining, stop)
            seconds = self._loop_s() - self._started_s
            await self._finish(joining, stopping)
        except BaseException:
            for task in (joining, stopping, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(joining, stopping, *self._tasks.values(), return_exceptions=True)
            with suppress(TokenmillError):  # raise the first error, which is the cause
                await self._store.close()
            raise
        await self._store.close()
        return self._report(seconds)

    async def _work(self, joining: "asyncio.Task[None]", stop: asyncio.Event) -> None:
        while True:
            self._changed.clear()
            self._collect(joining)
            await self._store.poll()
            self._report_progress()
            left = self._store.left
            if stop.is_set():
                self._halt.set()
                return
            if not left.pending and not left.running:
                return
            if not self._tasks and joining.done():
                raise self._no_member()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._changed.wait()

    # -- members -----------------------------------------------------------------------------------------------------

    async def _accept(self, members: PoolMembers) -> None:
        async for member in _each(members):
            same = sum(name == member.name or name.startswith(f"{member.name} (") for name in self._names)
            name = f"{member.name} ({same + 1})" if same else member.name
            self._names.append(name)
            task = self._start(member._replace(name=name), self._halt, self._on_member_snapshot(name))
            task.add_done_callback(lambda _: self._changed.set())
            self._tasks[name] = task
            self._changed.set()

    async def _await_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._halt.set()
        self._changed.set()

    def _collect(self, joining: "asyncio.Task[None]") -> None:
        """Collect ended workers. Engine failures are recorded; any other error is raised."""
        if joining.done() and not joining.cancelled() and (error := joining.exception()) is not None:
            if not isinstance(error, TokenmillError):
                raise error
            self._joining_error = error
        for name in [name for name, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(name)
            try:
                report = task.result().report
                failure = task.result().failure
            except EngineError as error:
                report = None
                failure = error
            self._last_error = failure or self._last_error
            self._ended[name] = MemberReport(name, report, failure.message if failure is not None else None)

    async def _finish(self, *others: "asyncio.Task[None]") -> None:
        """Stop all workers, including those that wait for their engine."""
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._tasks and not self._halt.is_set():
            await asyncio.wait(self._tasks.values(), timeout=_GRACE_TICKS * self._tick_s)
        self._halt.set()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._collect(others[0])

    def _no_member(self) -> EngineError:
        why = self._last_error or self._joining_error
        if why is None:
            message = "no engine joined the pool"
            return EngineError(message, hint=f"start an engine; {RESUME_HINT}", code="no_engine_joined")
        hint = "\n".join(filter(None, (RESUME_HINT, why.hint)))
        lost = [each.name for each in self._ended.values() if each.lost is not None]
        if not lost:
            return EngineError(f"no engine joined the pool: {why.message}", hint=hint, code="no_engine_joined")
        message = f"no engine is left; the last one, {lost[-1]}, failed: {why.message}"
        return EngineError(message, hint=hint, code="no_engine_left")

    # -- progress and reports ----------------------------------------------------------------------------------------

    def _on_member_snapshot(self, name: str) -> OnSnapshot:
        def on_snapshot(now: Snapshot) -> None:
            before = self._snapshots.get(name)
            if now.failed is not None and (before is None or before.failed is not now.failed):
                self._failed = now.failed
            self._snapshots[name] = now
            self._report_progress()

        return on_snapshot

    def _report_progress(self) -> None:
        working = {name: now for name, now in self._snapshots.items() if name in self._tasks}
        ended = {name: (self._snapshots.get(name), each.lost) for name, each in self._ended.items()}
        output = self._store.output_error
        self._on_snapshot(
            combined_snapshot(
                working,
                ended,
                elapsed_s=self._loop_s() - self._started_s,
                counts=self._store.counts,
                failed=self._failed,
                output=output.message if output is not None else None,
            )
        )

    def _report(self, seconds: float) -> PoolReport:
        members = tuple(self._ended[name] for name in self._names)
        reports = [each.report for each in members if each.report is not None]
        counts = self._store.counts
        ends = {report.end for report in reports}
        done = not counts.pending and not counts.running
        end: RunEnd = (
            "stopped" if not done else "cancelled" if "cancelled" in ends and "finished" not in ends else "finished"
        )
        notes = [f"{each.name} was lost: {each.lost}" for each in members if each.lost is not None]
        if self._joining_error is not None:
            notes.append(f"no more engines joined: {self._joining_error.message}")
        total = combined_report(reports, end=end, seconds=seconds, counts=counts, notes=notes)
        return PoolReport(total, members)


async def _each(members: PoolMembers) -> AsyncIterator[PoolMember]:
    if isinstance(members, asyncio.Queue):
        while (member := await members.get()) is not None:
            yield member
    elif isinstance(members, AsyncIterable):
        async for each in members:
            yield each
    else:
        for each in members:
            yield each
