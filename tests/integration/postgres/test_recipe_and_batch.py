"""Stages of a recipe, and batches, on a server where other runners work too, cancel, take up again and remove."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.fake_engine import FakeEngine
from support.jobs_store import answer, submitted
from support.worked import LIMIT_S
from tokenmill.engine.engine import Engine
from tokenmill.jobs.models import Batch
from tokenmill.jobs.scheduler.shape import EngineShape, shape_of
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.jobs.worker.stats import OnSnapshot
from tokenmill.recipes.local_runner import LocalRunner, OpenEngine, RunnerOptions
from tokenmill.recipes.runner import AnswerOrigin, Line

QUICK = WorkOptions(attempts=1, tick_s=0.05)
TURNS = 3  # of the worker's loop with nothing left but what another has: one that does not wait ends before


class Beside:
    """A crew whose engine is ready when another runner has taken a job."""

    def __init__(self, other: Store) -> None:
        self._other, self._engine = other, OpenEngine(FakeEngine())
        self.taken: int | None = None

    @property
    def origin(self) -> AnswerOrigin:
        return self._engine.origin

    async def ready(self, batch: Batch) -> tuple[Engine, EngineShape]:
        (job,) = self._other.start([self._other.waiting([batch.id], limit=1)[0].id]).running
        self.taken = job.id
        return await self._engine.ready(batch)


@pytest.mark.parametrize("how", ["answered", "given back"])
def test_a_stage_ends_with_what_other_runners_have_of_it(server: PostgresAddress, tmp_path: Path, how: str) -> None:
    lines: list[Line] = [
        {"custom_id": f"l{at}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"say {at}"}}
        for at in range(4)
    ]

    async def scenario(store: Store, other: Store) -> list[str]:
        crew, turns = Beside(other), 0

        def told(now: Snapshot) -> None:
            nonlocal turns
            turns += now.counts.done == len(lines) - 1
            if turns == TURNS and crew.taken is not None:
                if how == "answered":
                    other.commit([answer(crew.taken)])
                else:
                    other.release([crew.taken])

        @contextmanager
        def watch(_stage: str, _batch: Batch) -> Iterator[OnSnapshot]:
            yield told

        mill = LocalRunner(store, tmp_path, crew, RunnerOptions(worker=QUICK, watch=watch))
        async with asyncio.timeout(LIMIT_S):
            stage = await mill.run("first", lines)
        assert stage.end == "finished"
        assert mill.spent.answers == (3 if how == "answered" else 4)
        return [found.custom_id for found in stage.answers() if found.body is not None]

    with Store(server) as store, Store(server) as other:
        assert asyncio.run(scenario(store, other)) == ["l0", "l1", "l2", "l3"]


@dataclass
class AtWork:
    """A runner at work."""

    engine: FakeEngine
    task: "asyncio.Task[RunReport]"
    joining: "asyncio.Queue[Batch]"
    turned: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[], bool]) -> None:
        """It is looked at after each turn of the worker's loop."""
        while not holds():
            assert not self.task.done(), self.task.result()
            self.turned.clear()
            await self.turned.wait()

    async def has(self, *prompts: str) -> None:
        await self.until(lambda: self.engine.at_work == set(prompts))


def at_work(store: Store, *batches: Batch) -> AtWork:
    engine, turned, joining = FakeEngine(), asyncio.Event(), asyncio.Queue[Batch]()
    shape = shape_of(engine.capabilities, engine.identity)
    working = work(
        WorkTask(
            store,
            batches,
            engine,
            shape,
            options=QUICK,
            on_snapshot=lambda _: turned.set(),
            joining=joining,
            shards=store.shards(shape.width),
        )
    )
    task = asyncio.create_task(working)
    task.add_done_callback(lambda _: turned.set())
    return AtWork(engine, task, joining, turned)


def test_a_batch_that_somebody_removes_is_worked_no_more(server: PostgresAddress, tmp_path: Path) -> None:
    async def scenario(store: Store, other: Store) -> None:
        batches = [submitted(store, tmp_path / name, [f"gated {name}"]) for name in ("gone", "kept")]
        async with asyncio.timeout(LIMIT_S):
            runner = at_work(store, *batches)
            await runner.has("gated gone", "gated kept")
            other.submissions.forget(batches[0].id)
            await runner.has("gated kept")
            runner.engine.gate_open.set()
            report = await runner.task
        assert (report.end, report.counts.total, report.counts.done) == ("finished", 1, 1)

    with Store(server) as store, Store(server) as other:
        asyncio.run(scenario(store, other))


def test_a_batch_that_is_taken_up_again_after_it_was_cancelled_is_worked_on(
    server: PostgresAddress, tmp_path: Path
) -> None:
    async def scenario(store: Store, other: Store) -> None:
        batches = [submitted(store, tmp_path / name, [f"gated {name}"]) for name in ("back", "kept")]
        async with asyncio.timeout(LIMIT_S):
            runner = at_work(store, *batches)
            await runner.has("gated back", "gated kept")
            other.cancel(batches[0].id)
            await runner.has("gated kept")
            assert other.retry(batches[0].id, cancelled=True) == 1
            await runner.has("gated back", "gated kept")
            runner.engine.gate_open.set()
            report = await runner.task
        assert (report.end, report.counts.total, report.counts.done) == ("finished", 2, 2)

    with Store(server) as store, Store(server) as other:
        asyncio.run(scenario(store, other))


def test_a_batch_that_is_taken_up_again_after_it_was_finished_is_worked_on(
    server: PostgresAddress, tmp_path: Path
) -> None:
    """One that joins makes the finished ones forgotten; this one has jobs again."""

    async def scenario(store: Store, other: Store) -> None:
        first = submitted(store, tmp_path / "first", ["broken 1 first"])
        kept = submitted(store, tmp_path / "kept", ["gated kept"])
        async with asyncio.timeout(LIMIT_S):
            runner = at_work(store, first, kept)
            await runner.until(lambda: other.batch(first.id).finished)
            runner.joining.put_nowait(submitted(other, tmp_path / "joins", ["gated joins"]))
            await runner.has("gated kept", "gated joins")
            assert other.retry(first.id) == 1
            await runner.until(lambda: other.batch(first.id).counts.done == 1)
            runner.engine.gate_open.set()
            report = await runner.task
        assert (report.end, report.counts.done) == ("finished", 3)

    with Store(server) as store, Store(server) as other:
        asyncio.run(scenario(store, other))


def test_a_batch_that_stays_cancelled_keeps_nobody(server: PostgresAddress, tmp_path: Path) -> None:
    async def scenario(store: Store, other: Store) -> None:
        batches = [submitted(store, tmp_path / name, [f"gated {name}"]) for name in ("over", "kept")]
        async with asyncio.timeout(LIMIT_S):
            runner = at_work(store, *batches)
            await runner.has("gated over", "gated kept")
            other.cancel(batches[0].id)
            await runner.has("gated kept")
            runner.engine.gate_open.set()
            report = await runner.task
        assert (report.end, report.counts.done, report.counts.cancelled) == ("finished", 1, 1)

    with Store(server) as store, Store(server) as other:
        asyncio.run(scenario(store, other))
