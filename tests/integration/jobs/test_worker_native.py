"""The worker on the real native engine: heads computed once, and an engine that is killed under it."""

import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.native_engine import native, plan_for, run
from support.tiny_models import write_moe
from support.worked import QUICK
from tokenmill.config import EngineConfig
from tokenmill.engine import restart
from tokenmill.engine.engine import Answer, Piece, Request
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, State, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask, work
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.native.launching import start_restarting

DIGEST = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(16))
THINGS = ("river", "bridge", "harbour", "field", "engine", "tower", "garden", "mine", "road", "wall", "lake", "ship")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model"))


def write_jobs(path: Path) -> list[str]:
    """Twelve jobs behind one digest, and their names."""
    lines = []
    for number, thing in enumerate(THINGS):
        messages = [{"role": "system", "content": DIGEST}, {"role": "user", "content": f"Say a word about a {thing}."}]
        lines.append(
            {
                "custom_id": f"{number}-{thing}",
                "messages": messages,
                "temperature": 0,
                "max_tokens": 8,
                "ignore_eos": True,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [line["custom_id"] for line in lines]  # type: ignore[misc]


def submitted(store: Store, folder: Path) -> tuple[Batch, list[str]]:
    names = write_jobs(folder / "jobs.jsonl")
    how = Submission("m", output=str(folder / "out.jsonl"))
    return submit(store, folder / "jobs.jsonl", how).batch, names


def test_a_shared_head_is_computed_once_and_nothing_twice(moe: Path, tmp_path: Path) -> None:
    async def once() -> RunReport:
        async with native(moe, tmp_path / "state") as engine:
            cells = (await engine.status()).counters.cells_total
            shape = shape_of(engine.capabilities, engine.identity, cells_total=cells)
            with Output(store, batch) as output:
                return await work(WorkTask(store, [batch], engine, shape, outputs={batch.id: output}, options=QUICK))

    with Store(tmp_path / "store") as store:
        batch, names = submitted(store, tmp_path)
        report = run(once)
        assert report.answers == report.counts.done == 12
        assert report.minimum is not None
        assert report.minimum.exact
        assert report.minimum.tokens <= report.tokens.computed <= 1.02 * report.minimum.tokens
        assert report.tokens.cached > 5 * report.tokens.computed
        assert report.misses.lost_tokens == 0
        assert report.rates.prefill_tok_s is not None
        written = (tmp_path / "out.jsonl").read_bytes()
        assert [json.loads(line)["custom_id"] for line in written.splitlines()] == names
        usage = json.loads(written.splitlines()[-1])["response"]["body"]["usage"]
        assert usage["completion_tokens"] <= 8


def test_an_engine_that_is_killed_twice_costs_nothing_but_time(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt, then in the middle of answers."""
    monkeypatch.setattr(restart, "delay_s", lambda *_: 0.0)
    killed: list[int] = []

    async def once() -> RunReport:
        engine = await start_restarting(
            plan_for(moe), model_path=moe, config=EngineConfig(), state=tmp_path / "state", name="dies"
        )
        stream, begun, pieces = engine.stream, 0, 0

        def kill() -> None:
            pid = engine.identity.pid
            assert pid is not None
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

        async def followed(request: Request) -> AsyncGenerator[Piece | Answer, None]:
            nonlocal begun, pieces
            begun += 1
            if begun == 2:  # the first has been sent, or is about to be
                kill()
            async for event in stream(request):
                pieces += isinstance(event, Piece) and len(killed) == 1
                if pieces == 3 and len(killed) == 1:
                    kill()
                yield event

        monkeypatch.setattr(engine, "stream", followed)
        shape = shape_of(engine.capabilities, engine.identity)
        try:
            with Output(store, batch) as output:
                return await work(WorkTask(store, [batch], engine, shape, outputs={batch.id: output}, options=QUICK))
        finally:
            await engine.close()

    with Store(tmp_path / "store") as store:
        batch, names = submitted(store, tmp_path)
        report = run(once)
        assert len(set(killed)) == 2
        assert report.crashes == 2
        assert report.counts.done == 12
        assert store.batch(batch.id).totals.computed == 12
        assert {result.state for result in store.results(batch.id, 0, 20)} == {State.DONE}
    found = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == names


def worked_alone(model: Path, folder: Path, lines: list[dict[str, object]], *, context: int, lanes: int) -> RunReport:
    """A whole run on an engine of its own."""
    (folder / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def once() -> RunReport:
        plan = plan_for(model, context=context, sequences=lanes)
        async with native(model, folder / "state", plan=plan) as engine:
            cells = (await engine.status()).counters.cells_total
            shape = shape_of(engine.capabilities, engine.identity, cells_total=cells)
            with Output(store, batch) as output:
                return await work(WorkTask(store, [batch], engine, shape, outputs={batch.id: output}, options=QUICK))

    with Store(folder / "store") as store:
        batch = submit(store, folder / "jobs.jsonl", Submission("m", output=str(folder / "out.jsonl"))).batch
        return run(once)


def test_heads_inside_heads_are_computed_once_with_a_single_lane(moe: Path, tmp_path: Path) -> None:
    documents = [" ".join(f"Barge {each} carries {each * n} sacks of grain." for n in range(12)) for each in range(3)]
    lines: list[dict[str, object]] = [
        {
            "messages": [
                {"role": "system", "content": DIGEST},
                {"role": "user", "content": f"{documents[number % 3]} Question {number}: name a thing."},
            ],
            "temperature": 0,
            "max_tokens": 3,
        }
        for number in range(12)
    ]
    report = worked_alone(moe, tmp_path, lines, context=2048, lanes=1)
    assert report.counts.done == 12
    assert report.minimum is not None
    assert report.minimum.exact
    assert report.tokens.computed <= 1.02 * report.minimum.tokens
    assert report.misses.lines() == []


def test_a_prompt_fits_to_the_last_token_and_one_more_is_one_too_many(moe: Path, tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"custom_id": str(tokens), "prompt": [100 + at % 50 for at in range(tokens)], "max_tokens": 4}
        for tokens in (255, 256, 260)
    ]
    report = worked_alone(moe, tmp_path, lines, context=256, lanes=1)
    assert (report.counts.done, report.counts.failed) == (1, 2)
    fits, over, far = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert fits["response"]["body"]["usage"] == {"prompt_tokens": 255, "completion_tokens": 1, "total_tokens": 256} | {
        key: value for key, value in fits["response"]["body"]["usage"].items() if key.endswith("details")
    }
    assert (over["error"]["code"], far["error"]["code"]) == ("too_long", "too_long")
    assert ": 1 too many" in over["error"]["message"]
    assert ": 5 too many" in far["error"]["message"]
