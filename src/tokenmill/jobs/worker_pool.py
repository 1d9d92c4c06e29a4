"""Several engines on the same batches in one process: each with a worker and a portion of its own.

        hands --> one worker each --> the store, shared out by stretches
                                        |
        the crew's own books <----------+   writes the outputs, whoever comes and goes

A hand may come at any time. One whose engine is gone for good gives its jobs back, and the others go on with them; what
it was to blame for is noted as ever. It ends when every batch is finished, or when no hand is left and none can come.
Engines are started and closed by who sends them.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.jobs import together
from tokenmill.jobs.async_store import AsyncStore
from tokenmill.jobs.misses import Miss
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.progress import End, Failed, Report, Snapshot
from tokenmill.jobs.run_stats import Tell
from tokenmill.jobs.shape import EngineShape
from tokenmill.jobs.shard_allocator import ShardAllocator
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import KEPT, Options, Task, Worked, attempt

_GRACE_TICKS = 5  # for a worker to see that all is done; one that waits for its engine does not look


class PoolMember(NamedTuple):
    """An engine that is ready to work."""

    name: str
    engine: Engine
    shape: EngineShape


PoolMembers = Iterable[PoolMember] | AsyncIterable[PoolMember] | asyncio.Queue[PoolMember | None]
"""All at once, or as they come; from a queue, None: no more will."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What one of them did."""

    name: str
    report: Report | None  # None: its engine failed in a way that left none
    lost: str | None  # why it was gone before the end; None: it was not


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What all did."""

    whole: Report
    hands: tuple[MemberReport, ...]  # in the order in which they came


async def run_pool(
    store: Store,
    batches: Sequence[Batch],
    hands: PoolMembers,
    *,
    outputs: Mapping[int, Output] | None = None,
    options: Options | None = None,
    stop: asyncio.Event | None = None,
    tell: Tell | None = None,
    clock: Callable[[], float] | None = None,
    missed: Callable[[Miss], None] | None = None,
    coming: Callable[[], Iterable[int | None]] = tuple,
) -> PoolReport:
    """Work with all hands until every job of the batches has its outcome, or until told to stop.

    A job that is too long for one of them is left to those with a larger context; `coming` says the contexts of those
    that are expected, in tokens, None: not known. It fails when none is there nor expected that could do it.

    EngineError when no hand is left and none can come; StoreError and what the output raises as `work`: all after what
    was running has been put back. Two hands of one name are told apart by a number.
    """
    settings = options or Options()
    books = AsyncStore(store, batches, outputs or {}, clock=clock or store.now_s, most_deaths=settings.most_deaths)

    def begin(hand: PoolMember, portions: ShardAllocator, halt: asyncio.Event, tell: Tell) -> "asyncio.Task[Worked]":
        portion = portions.portion(hand.name, hand.shape.width)
        return asyncio.create_task(
            attempt(
                Task(
                    store,
                    batches,
                    hand.engine,
                    hand.shape,
                    options=settings,
                    stop=halt,
                    tell=tell,
                    clock=clock,
                    missed=missed,
                    portion=portion,
                )
            )
        )

    at_work = _Crew(books, ShardAllocator(store, coming=coming), begin, tell or (lambda _: None), settings.tick_s)
    return await at_work.run(hands, stop or asyncio.Event())


_Begin = Callable[[PoolMember, ShardAllocator, asyncio.Event, Tell], "asyncio.Task[Worked]"]


class _Crew:
    def __init__(self, books: AsyncStore, shared: ShardAllocator, begin: _Begin, tell: Tell, tick_s: float) -> None:
        self._books = books
        self._shared = shared
        self._begin = begin
        self._tell = tell
        self._tick_s = tick_s
        self._tasks: dict[str, asyncio.Task[Worked]] = {}
        self._names: list[str] = []  # as they came
        self._ended: dict[str, MemberReport] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._failed: Failed | None = None
        self._halt = asyncio.Event()
        self._changed = asyncio.Event()
        self._last: EngineError | None = None  # why the last one that was lost is gone
        self._not_come: TokenmillError | None = None  # why no more come
        self._loop_s = asyncio.get_running_loop().time
        self._began_s = self._loop_s()

    async def run(self, hands: PoolMembers, stop: asyncio.Event) -> PoolReport:
        """Until all is done."""
        coming = asyncio.create_task(self._enlist(hands))
        stopping = asyncio.create_task(self._await(stop))
        try:
            await self._work(coming, stop)
            seconds = self._loop_s() - self._began_s
            await self._dismiss(coming, stopping)
        except BaseException:
            for task in (coming, stopping, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(coming, stopping, *self._tasks.values(), return_exceptions=True)
            with suppress(TokenmillError):  # one error is enough, and the first says more
                await self._books.close()
            raise
        await self._books.close()
        return self._report(seconds)

    async def _work(self, coming: "asyncio.Task[None]", stop: asyncio.Event) -> None:
        while True:
            self._changed.clear()
            self._collect(coming)
            await self._books.look()
            self._tell_how()
            left = self._books.left
            if stop.is_set():
                self._halt.set()
                return
            if not left.pending and not left.running:
                return
            if not self._tasks and coming.done():
                raise self._none_left()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._changed.wait()

    # -- hands ---------------------------------------------------------------------------------------------------------

    async def _enlist(self, hands: PoolMembers) -> None:
        async for hand in _each(hands):
            same = sum(name == hand.name or name.startswith(f"{hand.name} (") for name in self._names)
            name = f"{hand.name} ({same + 1})" if same else hand.name
            self._names.append(name)
            task = self._begin(hand._replace(name=name), self._shared, self._halt, self._teller(name))
            task.add_done_callback(lambda _: self._changed.set())
            self._tasks[name] = task
            self._changed.set()

    async def _await(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._halt.set()
        self._changed.set()

    def _collect(self, coming: "asyncio.Task[None]") -> None:
        """Note who has ended; an engine that is gone is its own affair, anything else is everybody's."""
        if coming.done() and not coming.cancelled() and (error := coming.exception()) is not None:
            if not isinstance(error, TokenmillError):
                raise error
            self._not_come = error
        for name in [name for name, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(name)
            try:
                report = task.result().report
                gone = task.result().gone
            except EngineError as error:
                report = None
                gone = error
            self._last = gone or self._last
            self._ended[name] = MemberReport(name, report, gone.message if gone is not None else None)

    async def _dismiss(self, *beside: "asyncio.Task[None]") -> None:
        """No more is to be done: those at work end, the ones that wait for their engine too."""
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        if self._tasks and not self._halt.is_set():
            await asyncio.wait(self._tasks.values(), timeout=_GRACE_TICKS * self._tick_s)
        self._halt.set()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._collect(beside[0])

    def _none_left(self) -> EngineError:
        why = self._last or self._not_come
        if why is None:
            return EngineError("no engine came to work on the batches", hint=f"start one: {KEPT}")
        gone = [each.name for each in self._ended.values() if each.lost is not None]
        words = f"no engine is left: {gone[-1]} was the last, and is gone" if gone else "no engine came"
        return EngineError(f"{words}: {why.message}", hint="\n".join(filter(None, (KEPT, why.hint))))

    # -- tell ----------------------------------------------------------------------------------------------------------

    def _teller(self, name: str) -> Tell:
        def told(now: Snapshot) -> None:
            before = self._snapshots.get(name)
            if now.failed is not None and (before is None or before.failed is not now.failed):
                self._failed = now.failed
            self._snapshots[name] = now
            self._tell_how()

        return told

    def _tell_how(self) -> None:
        working = {name: now for name, now in self._snapshots.items() if name in self._tasks}
        ended = {name: (self._snapshots.get(name), each.lost) for name, each in self._ended.items()}
        output = self._books.output_error
        self._tell(
            together.snapshot(
                working,
                ended,
                elapsed_s=self._loop_s() - self._began_s,
                counts=self._books.counts,
                failed=self._failed,
                output=output.message if output is not None else None,
            )
        )

    def _report(self, seconds: float) -> PoolReport:
        hands = tuple(self._ended[name] for name in self._names)
        reports = [each.report for each in hands if each.report is not None]
        counts = self._books.counts
        ends = {report.end for report in reports}
        done = not counts.pending and not counts.running
        end: End = (
            "stopped" if not done else "cancelled" if "cancelled" in ends and "finished" not in ends else "finished"
        )
        lost = [f"{each.name} is gone: {each.lost}" for each in hands if each.lost is not None]
        notes = [*lost, *([f"no more engines came: {self._not_come.message}"] if self._not_come is not None else [])]
        return PoolReport(together.report(reports, end=end, seconds=seconds, counts=counts, notes=notes), hands)


async def _each(hands: PoolMembers) -> AsyncIterator[PoolMember]:
    if isinstance(hands, asyncio.Queue):
        while (hand := await hands.get()) is not None:
            yield hand
    elif isinstance(hands, AsyncIterable):
        async for each in hands:
            yield each
    else:
        for each in hands:
            yield each
