"""Batches that join others at work."""

import asyncio
import json
from pathlib import Path

from support.fake_engine import FakeEngine
from support.worked import LIMIT_S
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Submission
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work

JOBS = 150


def stored(store: Store, folder: Path, name: str, prompts: list[str]) -> Batch:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return submit(store, path, Submission("m", name=f"batch_{name}")).batch


def test_one_joins_while_another_runs(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        engine, joining, stop = FakeEngine(), asyncio.Queue[Batch](), asyncio.Event()
        long = stored(store, tmp_path, "long", ["slow"])
        shape = shape_of(engine.capabilities, engine.identity)
        running = asyncio.create_task(
            work(WorkTask(store, [long], engine, shape, options=WorkOptions(tick_s=0.01), joining=joining, stop=stop))
        )
        await engine.changed.wait()
        for name in ("one", "two"):
            joining.put_nowait(stored(store, tmp_path, name, [f"{name} {number}" for number in range(JOBS)]))
        while not all(store.named(f"batch_{name}").finished for name in ("one", "two")):
            assert not running.done()
            await asyncio.sleep(0.05)
        assert store.named("batch_long").counts.running == 1
        stop.set()
        assert (await running).end == "stopped"
        assert sorted(engine.seen.streams) == sorted(
            ["slow", *(f"{n} {i}" for n in ("one", "two") for i in range(JOBS))]
        )

    async def within() -> None:
        async with asyncio.timeout(LIMIT_S):
            with Store(tmp_path / "store") as store:
                await scenario(store)
                assert store.named("batch_long").counts.pending == 1

    asyncio.run(within())


def test_the_first_of_two_batches_is_answered_first(tmp_path: Path) -> None:
    """A later one with the same heads waits its turn, whether it is there from the beginning or joins."""
    head = "the same beginning of all prompts " * 40

    async def scenario(store: Store) -> None:
        engine, joining = FakeEngine(), asyncio.Queue[Batch]()
        names = ("one", "two", "three")
        one, two, three = (
            stored(store, tmp_path, name, [f"{head} {name} {number}" for number in range(30)]) for name in names
        )
        shape = shape_of(engine.capabilities, engine.identity)
        joining.put_nowait(three)
        async with asyncio.timeout(LIMIT_S):
            await work(WorkTask(store, [two, one], engine, shape, options=WorkOptions(tick_s=0.01), joining=joining))
        assert [prompt.split()[-2] for prompt in engine.seen.streams] == [name for name in names for _ in range(30)]

    with Store(tmp_path / "store") as store:
        asyncio.run(scenario(store))


def test_one_that_comes_too_late_is_left_as_it_is(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        engine, joining = FakeEngine(), asyncio.Queue[Batch]()
        shape = shape_of(engine.capabilities, engine.identity)
        async with asyncio.timeout(LIMIT_S):
            report = await work(WorkTask(store, [stored(store, tmp_path, "a", ["a"])], engine, shape, joining=joining))
        assert report.end == "finished"
        joining.put_nowait(stored(store, tmp_path, "b", ["b"]))
        assert store.named("batch_b").counts.pending == 1

    with Store(tmp_path / "store") as store:
        asyncio.run(scenario(store))
