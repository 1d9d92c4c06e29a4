"""The local runner on a store and an engine: resumed stages, budgets, failed lines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.ahead import pass_by, run_ahead
from support.fake_engine import FakeEngine
from support.native_engine import native, plan_for, run
from tokenmill.engine.engine import Answer as EngineAnswer
from tokenmill.engine.engine import Chat, Engine, Piece, Request
from tokenmill.jobs.models import Batch
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store, ask_to_cancel
from tokenmill.jobs.worker.loop import WorkOptions
from tokenmill.jobs.worker.progress import Snapshot
from tokenmill.jobs.worker.stats import OnSnapshot
from tokenmill.recipes.local_runner import LocalRunner, OpenEngine, RunnerOptions, Stage
from tokenmill.recipes.runner import Answered, AnswerOrigin, BatchRunner, Budget, Line, RecipeCost, chat_line, text_of

QUICK = WorkOptions(first_delay_s=0.01, tick_s=0.05)
HOUR_S = 3600.0
RULES = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(12))
ENOUGH_FOR_ONE = 245  # tokens: the rules, one question and its answer are 235, and another 20 each
THINGS = ("river", "bridge", "harbour", "field", "tower", "garden", "mine", "road")


def asked(words: Iterable[str], *, tokens: int = 8) -> list[Line]:
    return [
        chat_line(
            f"{number}-{word[:20]}",
            [{"role": "system", "content": RULES}, {"role": "user", "content": word}],
            max_tokens=tokens,
            temperature=0,
        )
        for number, word in enumerate(words)
    ]


def names(stage: Stage) -> list[str]:
    return [answer.custom_id for answer in stage.answers()]


class Heard(FakeEngine):
    """An engine that behaves as the last message says."""

    def stream(self, request: Request) -> AsyncGenerator[Piece | EngineAnswer, None]:
        assert isinstance(request.prompt, Chat)
        return super().stream(replace(request, prompt=request.prompt.messages[-1]["content"]))


class Nobody:
    """A provider whose engine must not be needed."""

    def __init__(self, model_id: str) -> None:
        self.origin = AnswerOrigin("none", model_id, "native", "none")

    async def ready(self, _batch: Batch) -> NoReturn:
        raise AssertionError("there was work")


class Late:
    """A provider whose engine never becomes ready."""

    origin = AnswerOrigin("late", "m", "native", "late")

    def __init__(self) -> None:
        self.asked, self.broken_off = asyncio.Event(), False

    async def ready(self, _batch: Batch) -> tuple[Engine, EngineShape]:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.broken_off = True
        raise AssertionError


def with_fake(
    folder: Path,
    work: Callable[[LocalRunner, FakeEngine, asyncio.Event], Awaitable[None]],
    *,
    within: Callable[[Callable[[], Awaitable[None]]], None] = run,
    **given: Any,
) -> None:
    """Run `work` with a local runner on an engine that behaves as its prompts say."""

    async def go() -> None:
        engine, stop = Heard(), asyncio.Event()
        with Store(folder) as store:
            await work(
                LocalRunner(store, folder, OpenEngine(engine), RunnerOptions(stop=stop, worker=QUICK, **given)),
                engine,
                stop,
            )

    within(go)


# -- on the real engine ------------------------------------------------------------------------------------------------


def test_a_run_ended_by_a_budget_resumes_without_computing_twice(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    told: list[tuple[str, str]] = []

    @contextmanager
    def watch(stage: str, batch: Batch) -> Iterator[OnSnapshot]:
        told.append((stage, batch.source))
        yield lambda _now: None

    async def night(store: Store, budget: Budget | None, engine: Engine) -> tuple[LocalRunner, Stage]:
        runner = LocalRunner(
            store,
            folder,
            OpenEngine(engine),
            RunnerOptions(budget=budget or Budget(), worker=QUICK, name="expand", watch=watch),
        )
        return runner, await runner.run("write", asked(THINGS, tokens=12))

    async def nights() -> None:
        plan = plan_for(
            smollm2_path, sequences=1
        )  # with more slots, all jobs may be in flight and none finished when the budget is used up
        async with native(smollm2_path, tmp_path / "state", plan=plan) as engine:
            with Store(folder) as store:
                runner, first = await night(store, Budget(tokens=ENOUGH_FOR_ONE), engine)
                assert (first.end, first.total, runner.end) == ("tokens", 8, "tokens")
                assert 0 < len(names(first)) == runner.spent.answers < 8
                assert runner.spent.tokens >= ENOUGH_FOR_ONE
                again = await runner.run("judge", asked(["another"]))
                assert (again.end, again.total, names(again)) == ("tokens", 1, [])
                before, done = runner.spent, names(first)
            with Store(folder) as store:
                runner, whole = await night(store, None, engine)
                assert (whole.end, runner.end) == ("finished", "finished")
                assert names(whole) == [line["custom_id"] for line in asked(THINGS)]
                assert [name for name in names(whole) if name in done] == done
                assert runner.spent.reused == before.answers
                assert runner.spent.answers == 8 - before.answers
                assert runner.spent.cached_tokens > runner.spent.prompt_tokens - runner.spent.cached_tokens
                assert runner.origin.model_id == engine.identity.model_id
                assert runner.origin.build == engine.identity.build

    run(nights)
    assert told == [("write", "expand: write"), ("write", "expand: write")]
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".jsonl") == []

    async def morning() -> None:
        with StoreReader(folder) as reader:
            model_id = reader.batches()[0].model_id
            assert [batch.counts.total for batch in reader.batches()] == [8, 1]
        with Store(folder) as store:
            runner = LocalRunner(store, folder, Nobody(model_id))
            stage = await runner.run("write", asked(THINGS, tokens=12))
            assert stage.end == "finished"
            assert runner.spent == RecipeCost(reused=8)
            assert all(text_of(answer) for answer in stage.answers())

    run(morning)


# -- on one that misbehaves --------------------------------------------------------------------------------------------


def test_a_failed_line_is_an_outcome(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        stage = await runner.run(
            "write", [*asked(["one", "too long", "half \ud800 a character", "two"]), {"custom_id": "?"}]
        )
        found = list(stage.answers())
        assert stage.end == "finished"
        assert [answer.code for answer in found] == [None, "too_long", "invalid_line", None, "invalid_line"]
        assert [answer.body is None for answer in found] == [False, True, True, False, True]
        assert "surrogate" in (found[2].message or "")
        assert text_of(found[0])
        assert found[4].custom_id == "?"
        assert found == list(stage.answers())
        assert (runner.spent.answers, runner.spent.failed, runner.spent.reused) == (2, 3, 0)

    with_fake(tmp_path, work)


def test_equal_lines_are_computed_once(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, engine: FakeEngine, _stop: asyncio.Event) -> None:
        stage = await runner.run("write", asked(["same", "same", "other"]))
        assert len(names(stage)) == 3
        assert len(engine.seen.streams) == 2
        assert (runner.spent.answers, runner.spent.reused) == (2, 1)
        other = await runner.run("again", asked(["other", "same"]))
        assert other.end == "finished"
        assert len(engine.seen.streams) == 2
        assert (runner.spent.answers, runner.spent.reused) == (2, 3)

    with_fake(tmp_path, work)


def test_no_lines_make_no_batch(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        stage = await runner.run("write", iter(()))
        assert (stage.end, stage.total, names(stage), runner.spent) == ("finished", 0, [], RecipeCost())
        with StoreReader(tmp_path) as reader:
            assert reader.batches() == []

    with_fake(tmp_path, work)


def test_a_stop_keeps_answers_after_a_gap(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, engine: FakeEngine, stop: asyncio.Event) -> None:
        lines = asked(["slow one", "quick", "slow two", "quicker"])
        running = asyncio.create_task(runner.run("write", lines))
        while len(engine.seen.streams) < 4 or len(engine.at_work) > 2:
            await asyncio.sleep(0)
        stop.set()
        stage = await running
        assert (stage.end, stage.total, runner.end) == ("stopped", 4, "stopped")
        assert names(stage) == ["1-quick", "3-quicker"]
        after = await runner.run("write", lines)
        assert (after.end, names(after)) == ("stopped", ["1-quick", "3-quicker"])

    with_fake(tmp_path, work)


def test_the_time_limit_ends_a_stage(tmp_path: Path) -> None:
    @contextmanager
    def watch(_stage: str, _batch: Batch) -> Iterator[OnSnapshot]:
        yield lambda now: pass_by(HOUR_S) if now.counts.done == 1 else None

    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        stage = await runner.run("write", asked(["slow", "quick"]))
        assert (stage.end, names(stage)) == ("hours", ["1-quick"])
        assert (await runner.run("judge", asked(["third"]))).end == "hours"
        finished = await runner.run("quick", asked(["quick"])[:0])
        assert finished.end == "finished"

    with_fake(tmp_path, work, within=run_ahead, budget=Budget(seconds=HOUR_S), watch=watch)


def test_the_time_limit_counts_from_the_start_of_the_run(tmp_path: Path) -> None:
    async def go() -> None:
        with Store(tmp_path) as store:
            began_s = asyncio.get_running_loop().time() - HOUR_S
            runner = LocalRunner(
                store, tmp_path, Nobody("m"), RunnerOptions(budget=Budget(seconds=HOUR_S), began_s=began_s)
            )
            assert (await runner.run("write", asked(["one"]))).end == "hours"

    run(go)


@pytest.mark.parametrize(("budget", "end"), [(None, "stopped"), (Budget(seconds=HOUR_S), "hours")])
def test_a_stop_cancels_loading(tmp_path: Path, budget: Budget | None, end: str) -> None:
    async def go() -> None:
        crew, stop = Late(), asyncio.Event()
        with Store(tmp_path) as store:
            runner = LocalRunner(store, tmp_path, crew, RunnerOptions(stop=stop, budget=budget or Budget()))
            running = asyncio.create_task(runner.run("write", asked(["one"])))
            await crew.asked.wait()
            if budget is None:
                stop.set()
            else:
                pass_by(HOUR_S)
            stage = await running
            assert (stage.end, stage.total, names(stage), crew.broken_off) == (end, 1, [], True)

    run_ahead(go)


def test_a_cancelled_batch_ends_the_stage(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, engine: FakeEngine, _stop: asyncio.Event) -> None:
        lines = asked(["slow"])
        running = asyncio.create_task(runner.run("write", lines))
        await engine.changed.wait()
        with StoreReader(tmp_path) as reader:
            (batch,) = reader.batches()
        await asyncio.to_thread(ask_to_cancel, tmp_path, batch.name)
        stage = await running
        assert (stage.end, stage.total) == ("cancelled", 1)
        assert list(stage.answers()) == [Answered("0-slow", None, "cancelled", "the batch was cancelled")]
        assert (await runner.run("write", lines)).end == "cancelled"
        assert runner.spent.failed == 2
        assert len(engine.seen.streams) == 1

    with_fake(tmp_path, work)


def test_the_batch_gets_the_priority(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        await runner.run("write", asked(["one"]))
        with StoreReader(tmp_path) as reader:
            (batch,) = reader.batches()
        assert (batch.priority, batch.source, batch.output) == (5, "distill a.jsonl: write", None)

    with_fake(tmp_path, work, priority=5, name="distill a.jsonl")


def test_tokens_of_other_clients_do_not_count(tmp_path: Path) -> None:
    """On a shared engine only the tokens of received answers count."""
    seen: list[Snapshot] = []

    @contextmanager
    def watch(_stage: str, _batch: Batch) -> Iterator[OnSnapshot]:
        yield seen.append

    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        stage = await runner.run("write", asked([f"thing {number}" for number in range(20)]))
        last = seen[-1].tokens
        assert stage.end == "tokens"
        assert runner.spent.tokens >= 3 * (last.computed + last.generated) / 4 > 0
        assert 0 < len(names(stage)) < 20

    with_fake(tmp_path, work, budget=Budget(tokens=60), exclusive=False, watch=watch)


def test_the_local_runner_is_a_batch_runner(tmp_path: Path) -> None:
    async def work(runner: LocalRunner, _engine: FakeEngine, _stop: asyncio.Event) -> None:
        typed: BatchRunner = runner
        assert typed.origin == AnswerOrigin("fake", "m", "native", "fake 1", 4096)

    with_fake(tmp_path, work)
