"""Jobs of a higher priority go first, also where workers have stretches of others: the order, not the time."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.fake_engine import FakeEngine
from support.jobs_store import Clock, answer, submitted
from support.pool_engines import LIMIT_S
from support.postgres import Cluster
from tokenmill.jobs.models import Batch, QueuedJob
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work

LOW, HIGH, LANES = 6000, 1500, 4
OPTIONS = WorkOptions(tick_s=0.05)
Share = Callable[[Store], ShardView]


@pytest.fixture(params=["folder", "shared in memory", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Address, Share]:
    if request.param == "server":
        server: Cluster = request.getfixturevalue("postgres")
        return server.fresh(), lambda store: store.shards(LANES)
    if request.param == "folder":
        return tmp_path / "store", lambda store: store.shards(LANES)
    return tmp_path / "store", lambda store: store.local_shards().add("only", LANES)


class Told(FakeEngine):
    """Says when so many have begun, and goes on when it may."""

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__(slots=LANES)
        self._stop = stop

    def _begun(self, prefix: str) -> int:
        return sum(prompt.startswith(prefix) for prompt in self.seen.streams)

    async def _until_alive(self, seconds: float | None) -> None:
        await super()._until_alive(0.0)
        if self._begun("high") >= HIGH:
            self._stop.set()


def test_all_of_a_batch_that_joins_with_a_higher_priority_goes_first(
    place: tuple[Address, Share], tmp_path: Path
) -> None:
    address, share = place

    async def run(store: Store, low: Batch) -> list[str]:
        stop, joining = asyncio.Event(), asyncio.Queue[Batch]()
        engine = Told(stop)
        shape = shape_of(engine.capabilities, engine.identity)
        async with asyncio.timeout(LIMIT_S):
            working = asyncio.create_task(
                work(
                    WorkTask(
                        store, [low], engine, shape, options=OPTIONS, stop=stop, joining=joining, shards=share(store)
                    )
                )
            )
            await engine.changed.wait()
            prompts = [f"high {number}" for number in range(HIGH)]
            joining.put_nowait(await asyncio.to_thread(submitted, store, tmp_path / "h", prompts, {"priority": 9}))
            await working
        return engine.seen.streams

    with Store(address) as store:
        low = submitted(store, tmp_path / "l", [f"low {number}" for number in range(LOW)])
        order = asyncio.run(run(store, low))
    first = next(at for at, prompt in enumerate(order) if prompt.startswith("high"))
    last = max(at for at, prompt in enumerate(order) if prompt.startswith("high"))
    between = [prompt for prompt in order[first:last] if prompt.startswith("low")]
    assert sum(prompt.startswith("high") for prompt in order) == HIGH
    assert len(between) <= 4 * LANES  # those whose lanes were waiting for the store


@pytest.fixture(params=["memory", "server"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Address, Callable[[Store], ShardView]]:
    def shared(store: Store) -> ShardView:
        found = store.shards(2) if request.param == "server" else store.local_shards(clock=Clock()).add("one", 2)
        assert found is not None
        return found

    if request.param == "server":
        server: Cluster = request.getfixturevalue("postgres")
        return server.fresh(), shared
    return tmp_path / "store", shared


def test_a_view_gives_what_is_free_and_more_urgent_before_its_own(
    pair: tuple[Address, Callable[[Store], ShardView]], tmp_path: Path
) -> None:
    address, shared = pair
    with Store(address) as store:
        low = submitted(store, tmp_path / "l", [f"low {number}" for number in range(200)])
        view = shared(store)
        assert {row.rank for row in view.window([low.id], again=False, limit=8)} == {0}
        high = submitted(store, tmp_path / "h", [f"high {number}" for number in range(100)], {"priority": 9})
        ranks = list[int]()
        batches = [low.id, high.id]
        while rows := view.window(batches, again=False, limit=16):
            ranks += [row.rank for row in rows]
            done(store, rows)
        assert ranks[:100] == [-9] * 100
        assert ranks[100:] == [0] * 192
        assert {row.rank for row in view.window(batches, again=True, limit=300)} == {0}


def test_from_the_beginning_it_is_read_by_priority(
    pair: tuple[Address, Callable[[Store], ShardView]], tmp_path: Path
) -> None:
    """Not in the order in which it got its stretches."""
    address, shared = pair
    with Store(address) as store:
        view, batches = shared(store), list[int]()
        for priority in (1, 5, 3):
            prompts = [f"{priority} {number}" for number in range(4)]
            batches.append(submitted(store, tmp_path / f"{priority}", prompts, {"priority": priority}).id)
            while view.window(batches[-1:], again=False, limit=16):
                pass
        rows = view.window(batches, again=True, limit=16)
    assert [row.rank for row in rows] == [-5] * 4 + [-3] * 4 + [-1] * 4


def done(store: Store, rows: Sequence[QueuedJob]) -> None:
    store.commit([answer(job.id) for job in store.start([row.id for row in rows]).running])
