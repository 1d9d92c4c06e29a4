"""What the worker does when things go wrong: jobs, the engine, other processes, the disk. A fake engine has the faults
that a real one cannot be made to have."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_engine import KILLED, UNKNOWN, FakeEngine, Parting, Seen, Unreachable, Widening, restarting
from support.jobs_store import Clock, submitted
from support.worked import LIMIT_S, QUICK, lines, run_prompts, worked
from tokenmill.engine.engine import Answer, KvLayout, Piece, Request
from tokenmill.errors import EngineError, StoreError, TokenmillError
from tokenmill.jobs.models import Batch, Failure, JobId, State
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store, ask_to_cancel
from tokenmill.jobs.worker.loop import RESUME_HINT, WorkOptions, WorkTask, work
from tokenmill.jobs.worker.progress import RunReport, Snapshot


def error_of(line: dict[str, dict[str, str]]) -> str:
    return line["error"]["code"]


def test_every_line_gets_an_answer_or_a_reason(tmp_path: Path) -> None:
    seen = Seen()
    prompts = [*(f"p{number}" for number in range(8)), "long", "broken 2 times", "broken 9 times", "late"]
    report, found = run_prompts(tmp_path, prompts, lambda: restarting(seen))
    assert [*found] == prompts  # in the order of the file
    assert report.end == "finished"
    assert (report.counts.done, report.counts.failed) == (9, 3)
    assert {prompt: error_of(line) for prompt, line in found.items() if line["error"]} == {
        "long": "too_long",
        "broken 9 times": "engine_failed",
        "late": "timeout",
    }
    assert "904 tokens too many" in found["long"]["error"]["message"]
    assert seen.streams.count("long") == 1  # no attempt can help
    assert seen.streams.count("broken 2 times") == seen.streams.count("broken 9 times") == 3
    assert "tried 3 times" in found["broken 9 times"]["error"]["message"]
    assert found["p3"]["response"]["body"]["choices"][0]["text"] == "p3: 0 1 2 3"


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "b',
        b"",
        b'{"prompt": null}',
        b'{"prompt": 7}',
        b'{"prompt": "b", "no_such_key": 1}',
        b'{"prompt": "b", "stop": 7}',
        b'{"prompt": "b", "temperature": "hot"}',
        b'{"messages": [7]}',
        b'{"messages": [{"role": "user", "content": "b"}], "tools": 7}',
        b'{"messages": [{"role": "user", "content": "b"}], "tool_choice": "none", "tools": [], "response_format": {}}',
    ],
)
def test_a_stored_line_that_cannot_be_decoded_fails_alone(tmp_path: Path, line: bytes) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "b", "c"])
    connection = sqlite3.connect(tmp_path / "store" / "store.db")
    with connection:
        ((block,),) = connection.execute("SELECT data FROM blocks").fetchall()
        first, _, *rest = block.split(b"\n")
        connection.execute("UPDATE blocks SET data = ?", (b"\n".join([first, line, *rest]),))
    connection.close()
    with Store(tmp_path / "store") as store:
        report = asyncio.run(worked_with(store, batch.id, FakeEngine, None))
    assert (report.end, report.counts.done, report.counts.failed) == ("finished", 2, 1)
    assert error_of(lines(Path(batch.output or ""))["b"]) == "refused"


def test_waiting_between_attempts_grows_and_holds_nobody_up(tmp_path: Path) -> None:
    seen, clock = Seen(), Clock()
    waits: list[float] = []

    def tell(now: Snapshot) -> None:
        """Nothing else is to be done: time is moved to the next attempt."""
        if now.retrying and not now.busy and now.counts.done == 2:
            retry_s = store.next_retry_s()
            if retry_s is not None and retry_s > clock():
                waits.append(retry_s - clock())
                clock.now_s = retry_s

    with Store(tmp_path / "store", clock=clock) as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "b", "broken 3 times"])

        async def run() -> RunReport:
            engine = FakeEngine(seen)
            shape = shape_of(engine.capabilities, engine.identity)
            options = WorkOptions(attempts=4, tick_s=0.01)
            async with asyncio.timeout(LIMIT_S):
                return await work(
                    WorkTask(store, [batch], engine, shape, options=options, on_snapshot=tell, clock=clock)
                )

        report = asyncio.run(run())
    assert report.counts.done == 3
    assert len(waits) == 3
    for wait, middle in zip(waits, (2.0, 4.0, 8.0), strict=True):
        assert 0.5 * middle <= wait <= 1.5 * middle


def test_a_job_that_kills_the_engine_twice_is_set_aside_and_no_other(tmp_path: Path) -> None:
    seen = Seen()
    prompts = [*(f"steady {number}" for number in range(10)), "poison", "q0", "q1"]
    report, found = run_prompts(tmp_path, prompts, lambda: restarting(seen))
    assert (report.counts.done, report.counts.quarantined, report.counts.failed) == (12, 1, 0)
    assert error_of(found["poison"]) == "engine_died"
    assert "SIGSEGV" in found["poison"]["error"]["message"]
    assert report.crashes == 2
    assert len(seen.together[0]) > 1
    suspects = seen.together[1] - {"poison"}
    assert suspects < seen.together[0]  # beside others only when those had come further than when it died


def test_two_poison_jobs_are_told_from_those_beside_them(tmp_path: Path) -> None:
    prompts = ["poison 1", "a", "b", "c", "poison 2", "d"]
    report, found = run_prompts(tmp_path, prompts, lambda: restarting(Seen()))
    assert (report.counts.done, report.counts.quarantined) == (4, 2)
    assert [prompt for prompt, line in found.items() if line["error"]] == ["poison 1", "poison 2"]
    assert report.crashes in (3, 4)  # three when both were at work at the first death


def test_jobs_at_work_when_somebody_kills_the_engine_are_done_again_without_blame(tmp_path: Path) -> None:
    seen, engines = Seen(), list[FakeEngine]()
    prompts = [f"steady {number}" for number in range(12)]

    def kill(_: Snapshot) -> None:
        if seen.lives < 4 and engines[-1].pieces >= 10 and engines[-1].at_work:
            engines[-1].die(KILLED)

    report, found = run_prompts(tmp_path, prompts, lambda: restarting(seen, started=engines.append), tell=kill)
    assert report.crashes == 3
    assert report.counts.done == 12
    assert [*found] == prompts
    with Store(tmp_path / "store") as store:
        batch = store.batches()[0]
        assert batch.totals.computed == 12  # each once


def test_a_job_alone_at_work_when_the_engine_is_killed_again_and_again_is_set_aside(tmp_path: Path) -> None:
    """A process that is killed for memory may leave no trace of why: whoever is there each time is to blame."""
    report, found = run_prompts(tmp_path, ["a", "poison", "b"], lambda: restarting(Seen(), words=UNKNOWN))
    assert (report.counts.done, report.counts.quarantined) == (2, 1)
    assert found["poison"]["error"]
    assert report.crashes == 3


@pytest.mark.parametrize("suspect", [False, True])
def test_a_job_in_flight_whenever_another_process_kills_the_engine_is_not_blamed(tmp_path: Path, suspect: bool) -> None:
    """Not even a suspect that is tried alone; the restart policy ends the run, and everything stays queued."""
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["slow", "a", "b"])
        job = JobId.of(batch.id, 1)
        if suspect:
            store.start([job])
            store.record_crash([job], Failure("engine_died", "it crashed"), retry_at_s=0.0)

        async def killed_again_and_again() -> None:
            engines = list[FakeEngine]()

            def kill(_: Snapshot) -> None:
                if "slow" in engines[-1].at_work:
                    engines[-1].die(KILLED)

            engine = restarting(Seen(), most_restarts=5, started=engines.append)
            try:
                with pytest.raises(EngineError, match="6 times"):
                    await worked(store, batch, engine, tell=kill)
            finally:
                await engine.close()

        asyncio.run(killed_again_and_again())
        left = store.job(job)
        assert left is not None
        assert (left.state, left.crashes) == (State.PENDING, 1 if suspect else 0)
        assert left.attempts == (1 if suspect else 0)
        counts = store.batch(batch.id).counts
        assert (counts.pending + counts.done, counts.running) == (3, 0)


def test_a_suspect_is_not_blamed_for_a_machine_that_is_lost_while_it_is_tried(tmp_path: Path) -> None:
    async def lost(store: Store, batch: Batch) -> None:
        engine = FakeEngine()
        running = asyncio.create_task(worked(store, batch, engine))
        async with asyncio.timeout(LIMIT_S):
            await engine.changed.wait()
            engine.die(KILLED)
            with pytest.raises(EngineError):
                await running

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["slow"])
        (job,) = store.start([JobId.of(batch.id, 1)]).running
        store.record_crash([job.id], Failure("engine_died", "it died"), retry_at_s=0.0)
        asyncio.run(lost(store, batch))
        after = store.job(job.id)
        assert after is not None
        assert (after.state, after.crashes) == (State.PENDING, 1)


def test_an_engine_that_fails_for_good_ends_the_work_and_all_can_go_on(tmp_path: Path) -> None:
    seen = Seen()
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "poison 1", "poison 2", "poison 3", "b"])

        async def run(most_restarts: int) -> RunReport:
            engine = restarting(seen, most_restarts=most_restarts)
            try:
                return await worked(store, batch, engine)
            finally:
                await engine.close()

        with pytest.raises(EngineError, match="3 times") as caught:
            asyncio.run(run(most_restarts=2))
        assert RESUME_HINT in (caught.value.hint or "")
        assert store.batch(batch.id).counts.running == 0
        seen.lives = 0
        report = asyncio.run(run(most_restarts=20))
    assert (report.counts.done, report.counts.quarantined) == (2, 3)


def test_an_engine_that_was_found_and_dies_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="SIGSEGV"):
        run_prompts(tmp_path, ["a", "poison", "b"], FakeEngine)
    report, found = run_prompts(tmp_path, ["a", "poison", "b"], lambda: restarting(Seen()))
    assert error_of(found["poison"]) == "engine_died"
    assert report.counts.done == 2


def test_a_server_that_cannot_be_reached_for_a_while_costs_no_job_an_attempt(tmp_path: Path) -> None:
    seen = Seen()
    prompts = [f"p{number}" for number in range(24)]

    async def run() -> RunReport:
        engine, told = Unreachable(seen), list[str]()

        def tell(now: Snapshot) -> None:
            if now.counts.done and now.busy and not told:
                engine.reachable = False
            if now.engine is not None:
                told.append(now.engine)
                engine.reachable = True

        return await worked(store, batch, engine, tell=tell)

    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts)
        report = asyncio.run(run())
        assert report.crashes
        assert report.counts.done == 24
        assert all(
            job is not None and job.attempts == 1 for job in (store.job(JobId.of(batch.id, n)) for n in range(1, 25))
        )


def test_an_engine_that_fails_every_request_ends_the_work_before_every_job_has_failed(tmp_path: Path) -> None:
    prompts = [f"broken 99 {number}" for number in range(40)]
    with pytest.raises(EngineError, match="failed 12 times"):
        run_prompts(tmp_path, prompts, lambda: restarting(Seen()))
    with Store(tmp_path / "store") as store:
        counts = store.batches()[0].counts
        assert counts.running == 0
        assert counts.pending > 20


def test_stopping_puts_back_what_runs_and_counts_no_attempt(tmp_path: Path) -> None:
    stop = asyncio.Event()

    def tell(now: Snapshot) -> None:
        if now.busy == 2 and now.counts.done == 2:
            stop.set()

    report, found = run_prompts(
        tmp_path, ["a", "slow 1", "slow 2", "b"], lambda: restarting(Seen()), stop=stop, tell=tell
    )
    assert report.end == "stopped"
    assert report.minimum is None  # nobody is kept waiting for it
    assert (report.counts.done, report.counts.pending, report.counts.running) == (2, 2, 0)
    assert [*found] == ["a"]  # what follows a line without an outcome waits for it
    with Store(tmp_path / "store") as store:
        batch = store.batches()[0]
        assert [store.job(JobId.of(batch.id, number)).attempts for number in (2, 3)] == [0, 0]  # type: ignore[union-attr]


def test_a_batch_that_another_process_cancels_ends_within_seconds(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", *(f"slow {n}" for n in range(1, 30))])

        def tell(now: Snapshot) -> None:
            if now.busy == 4 and now.elapsed_s > 0.2 and not asked:
                ask_to_cancel(tmp_path / "store", batch.name)
                asked.append(True)

        asked: list[bool] = []
        report = asyncio.run(worked_with(store, batch.id, FakeEngine, tell))
        assert report.end == "cancelled"
        assert report.counts.done + report.counts.cancelled == 30
        assert report.counts.cancelled >= 29
    found = lines(tmp_path / "jobs.out")
    assert len(found) == 30
    assert error_of(found["slow 7"]) == "cancelled"


async def worked_with(
    store: Store, batch: int, engine: type[FakeEngine], tell: Callable[[Snapshot], None] | None
) -> RunReport:
    return await worked(store, store.batch(batch), engine(), tell=tell)


def test_equal_jobs_are_computed_once_and_follow_their_equal(tmp_path: Path) -> None:
    seen = Seen()
    report, found = run_prompts(
        tmp_path, ["same"] * 5 + ["other", "broken 1 x", "broken 1 x"], lambda: restarting(seen)
    )
    assert report.counts.done == 8
    assert report.answers == 3
    assert seen.streams.count("same") == 1
    assert seen.streams.count("broken 1 x") == 2
    assert len(found) == 3  # by prompt; all eight are there
    assert len((tmp_path / "jobs.out").read_text().splitlines()) == 8


def test_what_has_come_when_a_batch_is_cancelled_is_done(tmp_path: Path) -> None:
    """Its answers are computed, so they count: no more are computed than are done."""
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", [f"p{number}" for number in range(400)])

        def tell(now: Snapshot) -> None:
            if now.counts.done > 8 and not asked:
                ask_to_cancel(tmp_path / "store", batch.name)
                asked.append(True)

        asked: list[bool] = []
        report = asyncio.run(worked_with(store, batch.id, FakeEngine, tell))
        after = store.batch(batch.id)
        assert report.end == "cancelled"
        assert after.totals.computed == report.answers == after.counts.done
        assert after.counts.done + after.counts.cancelled == 400


def test_deadlines_that_pass_fail_what_has_not_been_started(tmp_path: Path) -> None:
    clock = Clock()
    with Store(tmp_path / "store", clock=clock) as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "b"], {"deadline_s": clock.now_s + 1})
        assert batch.counts.pending == 2
        clock.now_s += 2
        report = asyncio.run(worked_with(store, batch.id, FakeEngine, None))
    assert report.counts.failed == 2
    assert error_of(lines(tmp_path / "jobs.out")["a"]) == "deadline"


def test_an_output_that_is_gone_does_not_stop_the_work_but_is_an_error_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prompts = [f"p{number}" for number in range(8)]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts, {"output": str(tmp_path / "out" / "results.jsonl")})
        told: list[str] = []

        def tell(now: Snapshot) -> None:
            if now.counts.done == 0:
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
            told.append(now.output or "")

        with pytest.raises(TokenmillError, check=lambda error: error.code == "output_removed"):
            asyncio.run(worked_with(store, batch.id, FakeEngine, tell))
        assert store.batch(batch.id).counts.done == 8
        (tmp_path / "out").mkdir()
        report = asyncio.run(worked_with(store, batch.id, FakeEngine, None))
        assert report.answers == 0
    assert [*lines(tmp_path / "out" / "results.jsonl")] == prompts


def test_a_store_that_is_gone_ends_the_work_with_its_error(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "b", "c"])

        def tell(now: Snapshot) -> None:
            shutil.rmtree(tmp_path / "store", ignore_errors=True)

        with pytest.raises(StoreError, check=lambda error: error.code == "store_removed"):
            asyncio.run(worked_with(store, batch.id, FakeEngine, tell))


def test_a_job_that_died_in_one_run_is_tried_alone_in_the_next(tmp_path: Path) -> None:
    seen = Seen()
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "poison", "b", "c"])
        with pytest.raises(EngineError):
            asyncio.run(worked_with(store, batch.id, FakeEngine, None))

        async def again() -> RunReport:
            engine = restarting(seen)
            try:
                return await worked(store, batch, engine, options=QUICK)
            finally:
                await engine.close()

        report = asyncio.run(again())
        assert report.crashes == 1  # the second of two
        assert seen.together == [{"poison"}]
        assert store.batch(batch.id).counts.quarantined == 1
        states = [result.state for result in store.results(batch.id, 0, 10)]
    assert states == [State.DONE, State.QUARANTINED, State.DONE, State.DONE]


def test_reuse_that_was_expected_and_did_not_happen_is_counted_and_explained(tmp_path: Path) -> None:
    prompts = [f"{'a head that all of them share ' * 60}{number}" for number in range(6)]
    report, _ = run_prompts(tmp_path, prompts, FakeEngine)  # which says that it has reused nothing
    (tallied,) = report.misses.by_cost()
    assert (tallied.cause, tallied.jobs) == ("unknown", 5)
    assert tallied.lost_tokens > 5 * 1500
    assert "it reused nothing" in tallied.examples[0].message
    assert report.minimum is not None
    assert report.minimum.tokens < report.tokens.computed / 5


def test_what_was_dropped_since_the_engine_was_asked_last_explains_a_miss(tmp_path: Path) -> None:
    class Forgetful(FakeEngine):
        async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
            async for event in super().stream(request):
                if isinstance(event, Answer):
                    self.evicted_tokens = (self.evicted_tokens or 0) + 700
                yield event

    def engine() -> FakeEngine:
        made = Forgetful(slots=1)
        made.evicted_tokens = 0
        return made

    prompts = [f"{'what all of them share ' * 60}{number}" for number in range(4)]
    slow = replace(QUICK, tick_s=20.0)  # nobody asks the engine in between
    report, _ = run_prompts(tmp_path, prompts, engine, options=slow)
    (tallied,) = report.misses.by_cost()
    assert (tallied.cause, tallied.jobs) == ("evicted", 3)


def test_an_engine_that_is_started_again_gets_the_width_that_was_measured(tmp_path: Path) -> None:
    seen, engines = Seen(), list[FakeEngine]()
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a", "poison", "b"])

        async def run() -> None:
            engine = restarting(seen, kind=Widening, started=engines.append)
            shape = shape_of(engine.capabilities, engine.identity, width=2)
            async with asyncio.timeout(LIMIT_S):
                await work(WorkTask(store, [batch], engine, shape, options=QUICK))
            await engine.close()

        asyncio.run(run())
    widened = [engine.asked for engine in engines if isinstance(engine, Widening)]
    assert widened[0] == []  # who measured has set it
    assert widened[1:] == [[2]] * (len(engines) - 1)
    assert len(engines) == 3


@pytest.mark.parametrize("layout", ["per_slot", "unified"])
def test_a_restarted_engine_gets_its_kv_layout_back(tmp_path: Path, layout: KvLayout) -> None:
    engines = list[FakeEngine]()

    def started(engine: FakeEngine) -> None:
        assert isinstance(engine, Parting)
        if not engines:  # as the run has set the first one
            engine.kv_layout = layout
        engines.append(engine)

    run_prompts(tmp_path, ["a", "poison"], lambda: restarting(Seen(), kind=Parting, started=started))
    assert [engine.kv_layout for engine in engines if isinstance(engine, Parting)][:-1] == [layout] * 2


def test_a_width_that_a_run_did_not_choose_is_left_alone(tmp_path: Path) -> None:
    engines = list[FakeEngine]()
    run_prompts(tmp_path, ["a", "poison"], lambda: restarting(Seen(), kind=Widening, started=engines.append))
    assert [engine.asked for engine in engines if isinstance(engine, Widening)] == [[]] * 3
