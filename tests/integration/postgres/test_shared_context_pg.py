"""Runners with unequal contexts on one server: what is too long for one is done by another, or fails if none can."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs_store import submitted
from support.limited_engine import LimitedEngine, prompt
from support.worked import LIMIT_S, QUICK
from tokenmill.jobs.models import Batch, Counts, JobId
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.sharding.view import WorkerSpec
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask, work
from tokenmill.jobs.worker.progress import RunReport

LONG = [prompt(f"l{number}", 60) for number in range(24)]
SHORT = [prompt(f"s{number}", 20) for number in range(24)]


@pytest.fixture
def stores(server: PostgresAddress) -> Iterator[tuple[Store, Store]]:
    with Store(server) as one, Store(server) as two:
        yield one, two


async def runner(store: Store, batch: Batch, engine: LimitedEngine, stop: asyncio.Event | None = None) -> RunReport:
    shape = shape_of(engine.capabilities, engine.identity)
    async with asyncio.timeout(LIMIT_S):
        return await work(
            WorkTask(
                store,
                [batch],
                engine,
                shape,
                options=QUICK,
                stop=stop or asyncio.Event(),
                shards=store.shards(shape.width),
            )
        )


async def refused(engine: LimitedEngine, jobs: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(engine.refusals) < jobs:
            await engine.refused.wait()
            engine.refused.clear()


async def put_back(store: Store, batch: Batch) -> None:
    async with asyncio.timeout(LIMIT_S):
        while store.batch(batch.id).counts.running:
            await asyncio.sleep(QUICK.tick_s)


@pytest.mark.parametrize("says", [True, False])
def test_what_is_too_long_for_one_is_done_by_another(stores: tuple[Store, Store], tmp_path: Path, says: bool) -> None:
    batch = submitted(stores[0], tmp_path / "jobs.jsonl", [*LONG, *SHORT])

    async def run() -> tuple[LimitedEngine, LimitedEngine]:
        small, large = LimitedEngine(30, says=says), LimitedEngine(100, says=says)
        stores[1].announce(WorkerSpec("m", None))  # it loads
        first = asyncio.create_task(runner(stores[0], batch, small))
        await refused(small, 24)  # it alone is at work, and fails none
        await asyncio.gather(first, runner(stores[1], batch, large))
        return small, large

    small, large = asyncio.run(run())
    assert stores[0].batch(batch.id).counts == Counts(done=48)
    assert max(Counter(small.refusals).values()) == 1
    assert set(LONG) <= set(large.seen.streams)


@pytest.mark.parametrize(
    ("other", "room"),
    [(None, 30), (WorkerSpec("another", None), 30), (WorkerSpec("m", None, (999,)), 30), (WorkerSpec("m", 50), 50)],
    ids=["nobody", "another model", "another batch", "too little room"],
)
def test_it_fails_where_nobody_else_can_do_it(
    stores: tuple[Store, Store], tmp_path: Path, other: WorkerSpec | None, room: int
) -> None:
    batch = submitted(stores[0], tmp_path / "jobs.jsonl", [*LONG, *SHORT])
    if other is not None:
        stores[1].announce(other)

    async def run() -> RunReport:
        return await runner(stores[0], batch, LimitedEngine(30))

    assert asyncio.run(run()).end == "finished"
    assert stores[0].batch(batch.id).counts == Counts(done=24, failed=24)
    assert stores[0].failures_by_code(batch.id) == {"too_long": 24}
    said = {found.message or "" for found in stores[0].failures(batch.id, 0, 100)}
    assert all("60 tokens" in words and f" {room}: {60 - room} " in words for words in said), said


def test_it_fails_when_the_one_with_room_leaves(server: PostgresAddress, tmp_path: Path) -> None:
    async def run(store: Store, other: Store, batch: Batch) -> LimitedEngine:
        small, large, stop = LimitedEngine(30), LimitedEngine(100), asyncio.Event()
        away = asyncio.create_task(runner(other, batch, large, stop))
        await large.changed.wait()
        working = asyncio.create_task(runner(store, batch, small))
        await refused(small, 1)
        stop.set()
        await away
        await asyncio.to_thread(other.close)
        assert (await working).end == "finished"
        return small

    prompts = [f"slow {text}" for text in LONG]
    with Store(server) as store:
        other = Store(server)
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts)
        small = asyncio.run(run(store, other, batch))
        assert store.batch(batch.id).counts == Counts(failed=24)
    assert max(Counter(small.refusals).values()) == 1


def test_a_runner_stopped_while_others_are_to_do_the_rest_leaves_it_to_them(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    batch = submitted(stores[0], tmp_path / "jobs.jsonl", LONG)
    stores[1].announce(WorkerSpec("m", 100))

    async def run() -> RunReport:
        small, stop = LimitedEngine(30), asyncio.Event()
        working = asyncio.create_task(runner(stores[0], batch, small, stop))
        await refused(small, 24)
        await put_back(stores[0], batch)
        stop.set()
        return await working

    assert asyncio.run(run()).end == "stopped"
    assert stores[0].batch(batch.id).counts == Counts(pending=24)
    jobs = [stores[0].job(JobId.of(batch.id, line)) for line in range(1, 25)]
    assert {job.attempts for job in jobs if job is not None} == {0}
