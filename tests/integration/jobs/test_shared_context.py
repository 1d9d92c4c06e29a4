"""Workers with unequal contexts on one batch: what is too long for one is done by another, or fails if none can."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from support.fake_engine import KILLED, FakeEngine
from support.jobs_store import submitted
from support.limited_engine import LimitedEngine, prompt
from support.pool_engines import LIMIT_S, hand, run_test_pool
from support.worked import QUICK, run_prompts
from tokenmill.engine.engine import Answer, FinishReason, Usage
from tokenmill.errors import TooLong
from tokenmill.jobs.models import Batch, Counts, JobId
from tokenmill.jobs.sharding.allocator import with_context
from tokenmill.jobs.sharding.view import WorkerSpec
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.pool import PoolMember, PoolReport
from tokenmill.jobs.worker.retries import cut_short

LONG = [prompt(f"l{number}", 60) for number in range(24)]
SHORT = [prompt(f"s{number}", 20) for number in range(24)]


def counts(store: Store, batch: Batch) -> Counts:
    return store.batch(batch.id).counts


def why(store: Store, batch: Batch) -> set[str]:
    return {found.message or "" for found in store.failures(batch.id, 0, 100)}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("first", ["small", "large"])
def test_what_is_too_long_for_one_is_done_by_another(tmp_path: Path, first: str, says: bool) -> None:
    async def run() -> tuple[PoolReport, LimitedEngine, LimitedEngine]:
        small, large = LimitedEngine(30, says=says), LimitedEngine(100, says=says)
        hands = [hand("small", small), hand("large", large)]
        return await run_test_pool(store, [batch], hands if first == "small" else hands[::-1]), small, large

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [*LONG, *SHORT])
        _, small, large = asyncio.run(run())
        assert counts(store, batch) == Counts(done=48)
        jobs = [store.job(JobId.of(batch.id, line)) for line in range(1, 49)]
        assert {job.attempts for job in jobs if job is not None} == {1}
    assert max(Counter(small.refusals).values(), default=0) <= 1  # none is given to it twice
    assert set(LONG) <= set(large.seen.streams)


def test_nor_is_it_given_to_others_with_no_more_room(tmp_path: Path) -> None:
    async def run() -> list[LimitedEngine]:
        one, other, large = LimitedEngine(30), LimitedEngine(30), LimitedEngine(100)
        coming = asyncio.Queue[PoolMember | None]()
        coming.put_nowait(hand("one", one))
        working = asyncio.create_task(
            run_test_pool(store, [batch], coming, expected=lambda: () if large.at_work else (100,))
        )
        async with asyncio.timeout(LIMIT_S):
            while len(one.refusals) < len(LONG):
                await one.refused.wait()
                one.refused.clear()
        for each in (hand("other", other), hand("large", large), None):
            coming.put_nowait(each)
        await working
        return [one, other, large]

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", LONG)
        one, other, large = asyncio.run(run())
        assert counts(store, batch) == Counts(done=24)
    assert sorted(one.refusals) == sorted(large.seen.streams) == sorted(LONG)
    assert other.seen.streams == []


def test_what_none_has_room_for_fails_by_the_largest(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        return await run_test_pool(store, [batch], [hand("small", LimitedEngine(30)), hand("large", LimitedEngine(50))])

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [*LONG, *SHORT])
        asyncio.run(run())
        assert counts(store, batch) == Counts(done=24, failed=24)
        assert store.failures_by_code(batch.id) == {"too_long": 24}
        said = why(store, batch)
    assert all("60 tokens" in words and "context" in words and " 50: 10 " in words for words in said), said


def test_it_fails_when_the_one_with_room_is_lost(tmp_path: Path) -> None:
    async def run() -> tuple[LimitedEngine, PoolReport]:
        small, large = LimitedEngine(30), LimitedEngine(100)

        async def lose() -> None:
            await large.changed.wait()
            await small.refused.wait()
            large.die(KILLED)

        losing = asyncio.create_task(lose())
        found = await run_test_pool(store, [batch], [hand("small", small), hand("large", large)])
        await losing
        return small, found

    prompts = [f"slow {text}" for text in LONG]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [*prompts, *SHORT])
        small, report = asyncio.run(run())
        assert counts(store, batch) == Counts(done=24, failed=24)
        assert store.failures_by_code(batch.id) == {"too_long": 24}
    assert max(Counter(small.refusals).values()) == 1
    assert report.total.end == "finished"


def test_one_that_is_expected_is_waited_for(tmp_path: Path) -> None:
    expected: list[int | None] = [100]

    async def run() -> None:
        small, coming = LimitedEngine(30), asyncio.Queue[PoolMember | None]()
        coming.put_nowait(hand("small", small))
        working = asyncio.create_task(run_test_pool(store, [batch], coming, expected=lambda: expected))
        async with asyncio.timeout(LIMIT_S):
            while len(small.refusals) < len(LONG):
                await small.refused.wait()
                small.refused.clear()
            while counts(store, batch) != Counts(pending=24):  # they were put back
                await asyncio.sleep(QUICK.tick_s)
        assert not working.done()
        expected.clear()  # its machine does not come up
        await working

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", LONG)
        asyncio.run(run())
        assert counts(store, batch) == Counts(failed=24)


def test_alone_it_fails_at_once_as_ever(tmp_path: Path) -> None:
    report, lines = run_prompts(tmp_path, ["too long", "fine"], FakeEngine)
    assert report.counts == Counts(done=1, failed=1)
    error = lines["too long"]["error"]
    assert error["code"] == "too_long"
    assert error["message"] == "the prompt has 5000 tokens and the context 4096 (904 tokens too many)"


@pytest.mark.parametrize(("room", "said"), [(0, "as it came"), (512, "as it came"), (600, "27 tokens too many")])
def test_an_error_tells_of_the_largest_context(room: int, said: str) -> None:
    error = TooLong("as it came", needed_tokens=627, context_tokens=512, hint="shorten it")
    found = with_context(error, room)
    assert said in found.message
    assert (found.needed_tokens, found.context_tokens, found.hint) == (627, max(512, room), "shorten it")


@pytest.mark.parametrize(("rooms", "lengths"), [((30, 100), [50]), ((30, 60), [40]), ((100, 30), [50])])
def test_an_answer_that_one_would_cut_short_is_written_by_another(
    tmp_path: Path, rooms: tuple[int, int], lengths: list[int]
) -> None:
    """As far as the largest can."""

    async def run() -> PoolReport:
        engines = [LimitedEngine(room) for room in rooms]
        return await run_test_pool(store, [batch], [hand(f"e{at}", engine) for at, engine in enumerate(engines)])

    with Store(tmp_path / "store") as store:
        prompts = [prompt(f"wordy{number}", 20) for number in range(12)]
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts, max_tokens=50)
        asyncio.run(run())
        assert counts(store, batch) == Counts(done=12)
        bodies = [json.loads(each.body or b"{}") for each in store.results(batch.id, 0, 20)]
    assert sorted({body["usage"]["completion_tokens"] for body in bodies}) == lengths


def test_an_answer_is_cut_short_where_the_one_with_more_room_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        small, large = LimitedEngine(30), LimitedEngine(100)

        async def lose() -> None:
            await large.changed.wait()
            while not large.at_work or len(small.seen.streams) < 2:
                await asyncio.sleep(QUICK.tick_s)
            large.die(KILLED)

        losing = asyncio.create_task(lose())
        await run_test_pool(store, [batch], [hand("small", small), hand("large", large)])
        await losing

    with Store(tmp_path / "store") as store:
        prompts = [prompt(f"steady wordy{number}", 20) for number in range(12)]
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts, max_tokens=50)
        asyncio.run(run())
        assert counts(store, batch) == Counts(done=12)


@pytest.mark.parametrize(
    ("reason", "written", "ceiling", "cut"),
    [("length", 10, 50, True), ("length", 50, 50, False), ("stop", 10, 50, False), ("length", 10, None, False)],
)
def test_an_answer_is_cut_short_by_the_context_alone(
    reason: FinishReason, written: int, ceiling: int | None, cut: bool
) -> None:
    found = cut_short(Answer("", reason, Usage(20, written, 0)), ceiling, 30)
    assert (found is not None) == cut
    if found is not None:
        assert (found.needed_tokens, found.context_tokens) == (31, 30)


def test_a_job_that_fits_is_found_behind_those_that_are_too_long(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(60)])
        *unfit, last = store.waiting([batch.id], limit=100)
        table = store.local_shards()
        small, large = table.add("small", 1), table.add("large", 1)
        small.register(WorkerSpec("m", 30), 1)
        large.register(WorkerSpec("m", 100), 1)
        for row in unfit:
            assert small.too_long(row.id, TooLong("x", needed_tokens=60, context_tokens=30)) is None
            assert not small.has(row)
            assert large.has(row)
        assert small.window([batch.id], again=True, limit=10) == [last]
        assert small.unrunnable() == []
        large.close()
        assert sorted(job for job, _ in small.unrunnable()) == sorted(row.id for row in unfit)
        assert small.unrunnable() == []
