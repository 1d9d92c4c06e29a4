"""Several engines on the same batches: who does what, and what happens when one comes, dies or is told to stop."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_engine import CRASH, KILLED, FakeEngine, Seen, restarting
from support.jobs_store import submitted
from support.pool_engines import LIMIT_S, Counting, Gated, hand, run_test_pool
from support.worked import QUICK
from tokenmill.engine.engine import EngineStatus
from tokenmill.errors import EngineError, StoreError
from tokenmill.jobs.models import Batch, JobId, QueuedJob, State
from tokenmill.jobs.store.store import Store, ask_to_cancel
from tokenmill.jobs.worker.loop import RESUME_HINT
from tokenmill.jobs.worker.pool import PoolMember, PoolReport
from tokenmill.jobs.worker.progress import Snapshot

HEAD = "".join(f"Rule {number}: a report names its author, its date and its mill. " for number in range(160))


def names(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def by_hand(report: PoolReport) -> dict[str, int]:
    return {each.name: each.report.answers if each.report is not None else 0 for each in report.members}


def all_done(store: Store, batch: Batch, report: PoolReport, path: Path) -> None:
    """Every job once, its line where it stood in the file."""
    now = store.batch(batch.id)
    assert report.total.end == "finished"
    assert now.finished
    assert now.counts.done == now.totals.computed == report.total.answers == sum(by_hand(report).values())
    assert [int(name.partition("-")[0]) for name in names(path)] == list(range(1, now.counts.total + 1))


def test_unequal_engines_do_every_job_once_in_one_output(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        fast = Counting()
        return await run_test_pool(store, [batch], [hand("fast", fast), hand("slow", Counting(behind=(4, fast)))])

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(160)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")
    done = by_hand(report)
    assert done["fast"] > done["slow"] > 0
    assert report.total.tokens.generated == 4 * 160
    assert [each.lost for each in report.members] == [None, None]


def test_a_head_is_computed_on_one_engine(tmp_path: Path) -> None:
    engines: dict[str, FakeEngine] = {}

    async def run() -> PoolReport:
        engines.update({name: FakeEngine() for name in "abc"})
        return await run_test_pool(store, [batch], [hand(name, engine) for name, engine in engines.items()])

    prompts = [f"Digest {number % 12}. {HEAD} Question {number}?" for number in range(60)]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts, max_tokens=8)
        all_done(store, batch, asyncio.run(run()), tmp_path / "jobs.out")
    at = Counter({(prompt[:10], name) for name, engine in engines.items() for prompt in engine.seen.streams})
    assert len(at) == 12
    assert sum(len(engine.seen.streams) for engine in engines.values()) == 60


@pytest.mark.parametrize("at", [0, 1])
def test_jobs_of_a_machine_that_is_lost_are_done_by_the_others_without_blame(tmp_path: Path, at: int) -> None:
    """The first one as well: no hand is needed for the output."""

    async def run() -> PoolReport:
        lost, other = Gated(), FakeEngine()

        async def lose() -> None:
            await lost.changed.wait()
            lost.die(KILLED)

        losing = asyncio.create_task(lose())
        hands = [hand("lost", lost), hand("other", other)]
        report = await run_test_pool(store, [batch], hands if at == 0 else hands[::-1])
        await losing
        return report

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"steady {number}" for number in range(20)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")
        jobs = [store.job(JobId.of(batch.id, line)) for line in range(1, 21)]
        assert [job.crashes for job in jobs if job is not None] == [0] * 20
    assert [each.lost for each in report.members if each.name == "lost"] == [KILLED]
    assert report.members[at].report is not None
    assert report.total.crashes == 1
    assert any("lost was lost" in note for note in report.total.notes)


def test_a_job_that_crashes_one_engine_after_another_is_set_aside(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        hands = [hand(name, FakeEngine()) for name in "abc"]
        return await run_test_pool(store, [batch], hands)

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["poison", *(f"q{number}" for number in range(12))])
        report = asyncio.run(run())
        assert store.batch(batch.id).counts.quarantined == 1
        assert store.batch(batch.id).counts.done == 12
    assert sum(each.lost == CRASH for each in report.members) == 2
    assert len(names(tmp_path / "jobs.out")) == 13


def test_one_that_comes_later_takes_what_the_first_has_not_begun(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        first, later = Gated(), Counting()
        coming = asyncio.Queue[PoolMember | None]()
        coming.put_nowait(hand("first", first))
        working = asyncio.create_task(run_test_pool(store, [batch], coming))
        await first.changed.wait()
        coming.put_nowait(hand("later", later))
        coming.put_nowait(None)
        async with asyncio.timeout(LIMIT_S):
            while later.answers < 30:
                await later.more(1)
        first.opened.set()
        return await working

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(40)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")
    assert by_hand(report)["later"] >= 30


def test_hands_may_come_from_anywhere_and_have_one_name(tmp_path: Path) -> None:
    async def coming() -> AsyncIterator[PoolMember]:
        for _ in range(2):
            yield hand("node", FakeEngine())

    async def run() -> PoolReport:
        return await run_test_pool(store, [batch], coming())

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(20)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")
    assert [each.name for each in report.members] == ["node", "node (2)"]


def test_all_is_kept_when_no_engine_is_left(tmp_path: Path) -> None:
    async def lost() -> PoolReport:
        engines = [Gated(), Gated()]

        async def lose(engine: Gated) -> None:
            await engine.changed.wait()
            engine.die(KILLED)

        losing = [asyncio.create_task(lose(engine)) for engine in engines]
        try:
            return await run_test_pool(store, [batch], [hand(f"e{at}", engine) for at, engine in enumerate(engines)])
        finally:
            await asyncio.gather(*losing)

    async def again() -> PoolReport:
        return await run_test_pool(store, [batch], [hand("new", FakeEngine())])

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(40)])
        with pytest.raises(EngineError) as caught:
            asyncio.run(lost())
        assert caught.value.code == "no_engine_left"
        assert RESUME_HINT in (caught.value.hint or "")
        assert store.batch(batch.id).counts.pending == 40
        all_done(store, batch, asyncio.run(again()), tmp_path / "jobs.out")


@pytest.mark.parametrize(("prompts", "fails"), [(["a"], True), ([], False)])
def test_no_engine_at_all(tmp_path: Path, prompts: list[str], fails: bool) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [*prompts])
        if fails:
            with pytest.raises(EngineError) as caught:
                asyncio.run(run_test_pool(store, [batch], []))
            assert caught.value.code == "no_engine_joined"
            assert caught.value.hint
        else:
            assert asyncio.run(run_test_pool(store, [batch], [])).total.end == "finished"


def test_who_sends_engines_may_fail_while_those_that_came_work_on(tmp_path: Path) -> None:
    async def coming() -> AsyncIterator[PoolMember]:
        yield hand("only", FakeEngine())
        raise EngineError("the cluster does not answer")

    async def run() -> PoolReport:
        return await run_test_pool(store, [batch], coming())

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(9)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")
    assert any("the cluster does not answer" in note for note in report.total.notes)


def test_stopping_puts_back_what_all_of_them_had(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        engines, stop = [Gated(), Gated()], asyncio.Event()
        working = asyncio.create_task(
            run_test_pool(store, [batch], [hand(f"e{at}", engine) for at, engine in enumerate(engines)], stop=stop)
        )
        for engine in engines:
            await engine.changed.wait()
        stop.set()
        return await working

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(40)])
        report = asyncio.run(run())
        assert (report.total.end, store.batch(batch.id).counts.pending) == ("stopped", 40)


def test_a_batch_that_is_cancelled_is_left_by_all(tmp_path: Path) -> None:
    async def run() -> PoolReport:
        engines = [Gated(), Gated()]
        working = asyncio.create_task(
            run_test_pool(store, [batch], [hand(f"e{at}", engine) for at, engine in enumerate(engines)])
        )
        for engine in engines:
            await engine.changed.wait()
        await asyncio.to_thread(ask_to_cancel, tmp_path / "store", batch.name)
        return await working

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(40)])
        report = asyncio.run(run())
        assert (report.total.end, report.total.counts.cancelled) == ("cancelled", 40)
    assert len(names(tmp_path / "jobs.out")) == 40


@pytest.mark.parametrize("dies", [False, True])
def test_an_equal_job_is_done_with_the_answer_of_another_worker_or_without_it(tmp_path: Path, dies: bool) -> None:
    """Each of two batches has the job; the second to start it holds it for the first."""
    prompts = [f"q{number}" for number in range(4)]

    async def run() -> PoolReport:
        first, second = Gated(), Counting()
        coming = asyncio.Queue[PoolMember | None]()
        coming.put_nowait(hand("first", first))
        held = asyncio.Event()

        def tell(_: Snapshot) -> None:
            if sum(map(len, store._held.values())) >= 4:
                held.set()

        working = asyncio.create_task(run_test_pool(store, [one, two], coming, on_snapshot=tell))
        async with asyncio.timeout(LIMIT_S):
            while len(first.at_work) < 4:
                await first.changed.wait()
                first.changed.clear()
            coming.put_nowait(hand("second", second))
            await held.wait()
        if dies:
            first.die(KILLED)
        first.opened.set()
        coming.put_nowait(None)
        return await working

    with Store(tmp_path / "store") as store:
        one = submitted(store, tmp_path / "one.jsonl", prompts)
        two = submitted(store, tmp_path / "two.jsonl", prompts)
        report = asyncio.run(run())
        done = [store.batch(each.id).counts.done for each in (one, two)]
    assert done == [4, 4]
    assert by_hand(report) == ({"first": 0, "second": 4} if dies else {"first": 4, "second": 0})
    assert len(names(tmp_path / "one.out")) == len(names(tmp_path / "two.out")) == 4


def test_all_are_told_as_one(tmp_path: Path) -> None:
    told: list[Snapshot] = []

    async def run() -> PoolReport:
        engines = [Counting(), Counting()]
        return await run_test_pool(
            store, [batch], [hand(f"e{at}", each) for at, each in enumerate(engines)], on_snapshot=told.append
        )

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(60)])
        asyncio.run(run())
    assert max(now.width for now in told) == 8
    assert all(now.busy <= now.width for now in told)
    assert told[-1].tokens.generated == 240
    assert told[-1].counts.done == 60


def test_who_waits_for_its_engine_does_not_keep_the_others(tmp_path: Path) -> None:
    """An engine that is being restarted when all is done."""

    class Restarting(FakeEngine):
        async def status(self) -> EngineStatus:
            return replace(await super().status(), state="starting")

    async def run() -> PoolReport:
        seen = Seen()
        away = restarting(seen, kind=Restarting)
        first = away.inner
        assert isinstance(first, FakeEngine)
        first.die(KILLED)
        try:
            return await run_test_pool(store, [batch], [hand("away", away), hand("here", FakeEngine())])
        finally:
            await away.close()

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(30)])
        report = asyncio.run(run())
        all_done(store, batch, report, tmp_path / "jobs.out")


def test_trouble_with_the_store_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[QueuedJob]:
        raise StoreError("the disk is gone")

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"q{number}" for number in range(30)])

        async def run() -> PoolReport:
            return await run_test_pool(store, [batch], [hand(name, FakeEngine()) for name in "ab"], options=QUICK)

        with monkeypatch.context() as patched:
            patched.setattr(Store, "waiting", broken)
            with pytest.raises(StoreError, match="the disk is gone"):
                asyncio.run(run())
        assert store.batch(batch.id).counts.running == 0
        assert {result.state for result in store.results(batch.id, 0, 50)} == {State.PENDING}
