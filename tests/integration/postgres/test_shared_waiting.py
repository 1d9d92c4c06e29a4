"""`tokenmill work` beside others: it waits while they have all that is left, and costs little for what is done."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.fake_engine import FakeEngine
from support.jobs_store import answer, pending, submitted
from support.worked import LIMIT_S, QUICK
from tokenmill.api import workers
from tokenmill.api.engines import batch as batch_engine
from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.options import EngineOptions
from tokenmill.api.progress import ignore
from tokenmill.api.stopping import Stop
from tokenmill.api.workers import BatchWorker
from tokenmill.config import Config, EngineConfig
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.async_store import AsyncStore


class Loaded:
    """Engines that were loaded."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []

    @asynccontextmanager
    async def up(self, *_: object) -> AsyncIterator[FakeEngine]:
        self.engines.append(FakeEngine())
        yield self.engines[-1]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    found = Loaded()
    monkeypatch.setattr(batch_engine, "open_engine", found.up)
    monkeypatch.setattr(workers, "POLL_S", 0.02)
    return found


def runner(store: Store, folder: Path) -> BatchWorker:
    setup = EngineSetup(EngineChoice("m", "m", EngineConfig(), folder, path=folder), EngineOptions(), Config())
    return BatchWorker(store, setup, QUICK, folder, Stop(), stay=False)


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not there():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("lost", [True, False])
def test_it_waits_while_another_has_all_that_is_left_and_takes_over_if_that_is_lost(
    server: PostgresAddress, store: Store, loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    """Without an engine as long as that has nothing to do."""
    caplog.set_level(logging.INFO, "tokenmill")
    batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
    other = Store(server)
    jobs = pending(other, batch)
    other.start(jobs)

    async def run() -> None:
        one = runner(store, tmp_path)
        working = asyncio.create_task(one.run(ignore))
        await until(lambda: "all remaining jobs are leased to other workers; waiting" in caplog.messages)
        assert not working.done()
        assert loaded.engines == []
        if not lost:
            other.commit([answer(job) for job in jobs])
        other.close()  # what it has is pending again
        async with asyncio.timeout(LIMIT_S):
            await working

    asyncio.run(run())
    assert store.batch(batch.id).counts == Counts(done=3)
    assert len(loaded.engines) == lost
    assert sum(len(engine.seen.streams) for engine in loaded.engines) == (3 if lost else 0)


def test_a_batch_that_was_done_and_is_retried_joins_again(
    store: Store, server: PostgresAddress, loaded: Loaded, tmp_path: Path
) -> None:
    held = submitted(store, tmp_path / "held", ["gated"])
    done = submitted(store, tmp_path / "done", ["late", "fine"])
    third = ["x"]

    async def run(other: Store) -> None:
        working = asyncio.create_task(runner(store, tmp_path).run(ignore))
        await until(lambda: other.batch(done.id).finished)
        assert other.batch(done.id).counts == Counts(done=1, failed=1)
        more = await asyncio.to_thread(submitted, other, tmp_path / "more", third)  # now the other is forgotten
        await until(lambda: other.batch(more.id).finished)
        assert await asyncio.to_thread(other.retry, done.id) == 1
        await until(lambda: loaded.engines[0].seen.streams.count("late") == 2 * QUICK.attempts)
        loaded.engines[0].gate_open.set()
        async with asyncio.timeout(LIMIT_S):
            await working

    with Store(server) as other:
        asyncio.run(run(other))
    assert store.batch(held.id).counts == Counts(done=1)
    assert store.batch(done.id).counts == Counts(done=1, failed=1)


def test_batches_that_are_done_are_not_looked_at_any_more(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = list[int]()
    batch = Store.batch

    def counted(self: Store, number: int) -> Batch:
        looked_at.append(number)
        return batch(self, number)

    async def run() -> Counts:
        first = submitted(store, tmp_path / "first", ["a"])
        books = AsyncStore(store, [first], {}, clock=store.now_s, max_crashes=2, shards=store.shards(4))
        for number in range(12):
            joins = submitted(store, tmp_path / str(number), [f"{number}"])
            rows = await books.join(joins, 10)
            store.commit([answer(job.id) for job in store.start([row.id for row in rows]).running])
        await books.poll()
        with monkeypatch.context() as patched:
            patched.setattr(Store, "batch", counted)
            await books.poll()
        counts = books.counts
        await books.close()
        return counts

    assert asyncio.run(run()) == Counts(pending=1, done=12)
    assert len(set(looked_at)) <= 2  # the first and the last
    assert len(looked_at) <= 6
