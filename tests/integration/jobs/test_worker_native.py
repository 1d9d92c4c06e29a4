"""The worker on the real native engine: heads computed once, and an engine that is killed under it."""

import asyncio
import json
import os
import signal
from pathlib import Path

from support.native_engine import native, plan_for, run
from support.worked import QUICK
from tokenmill.config import EngineConfig
from tokenmill.engine.start import start_watched
from tokenmill.engine.watched import Watched
from tokenmill.jobs.job import Batch, State, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.progress import Report, Snapshot
from tokenmill.jobs.shape import shape_of
from tokenmill.jobs.store import Store
from tokenmill.jobs.submit import submit
from tokenmill.jobs.worker import Options, work

DIGEST = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(16))
THINGS = ("river", "bridge", "harbour", "field", "engine", "tower", "garden", "mine", "road", "wall", "lake", "ship")


def write_jobs(path: Path, *, tokens: int = 8) -> list[str]:
    """Twelve jobs behind one digest, and their names."""
    lines = []
    for number, thing in enumerate(THINGS):
        messages = [{"role": "system", "content": DIGEST}, {"role": "user", "content": f"Say a word about a {thing}."}]
        lines.append({"custom_id": f"{number}-{thing}", "messages": messages, "temperature": 0, "max_tokens": tokens})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [line["custom_id"] for line in lines]  # type: ignore[misc]


def submitted(store: Store, folder: Path, *, tokens: int = 8) -> tuple[Batch, list[str]]:
    names = write_jobs(folder / "jobs.jsonl", tokens=tokens)
    how = Submission("m", output=str(folder / "out.jsonl"))
    return submit(store, folder / "jobs.jsonl", how).batch, names


def test_a_shared_head_is_computed_once_and_nothing_twice(smollm2_path: Path, tmp_path: Path) -> None:
    async def once() -> Report:
        async with native(smollm2_path, tmp_path / "state") as engine:
            cells = (await engine.status()).counters.cells_total
            shape = shape_of(engine.capabilities, engine.identity, cells_total=cells)
            with Output(store, batch) as output:
                return await work(store, [batch], engine, shape, outputs={batch.id: output}, options=QUICK)

    with Store(tmp_path / "store") as store:
        batch, names = submitted(store, tmp_path)
        report = run(once)
        assert report.answers == report.counts.done == 12
        assert report.least is not None
        assert report.least.exact
        assert report.least.tokens <= report.tokens.computed <= 1.02 * report.least.tokens
        assert report.tokens.cached > 5 * report.tokens.computed
        assert report.misses.lost_tokens == 0
        assert report.rates.prefill_tok_s is not None
        written = (tmp_path / "out.jsonl").read_bytes()
        assert [json.loads(line)["custom_id"] for line in written.splitlines()] == names
        usage = json.loads(written.splitlines()[-1])["response"]["body"]["usage"]
        assert usage["completion_tokens"] <= 8


def test_an_engine_that_is_killed_twice_costs_nothing_but_time(smollm2_path: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    async def once() -> Report:
        engine = await start_watched(
            plan_for(smollm2_path),
            model_path=smollm2_path,
            config=EngineConfig(),
            state=tmp_path / "state",
            name="dies",
        )

        def kill(now: Snapshot) -> None:
            """In the middle of a prompt, then in the middle of answers."""
            pid, far = engine.identity.pid, now.tokens.generated if killed else now.busy
            if (
                len(killed) < 2
                and pid is not None
                and pid not in killed
                and far >= (12 if killed else 2)
                and engine.current
            ):
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        try:
            with Output(store, batch) as output:
                return await _worked(store, batch, engine, output, kill)
        finally:
            await engine.close()

    with Store(tmp_path / "store") as store:
        batch, names = submitted(store, tmp_path, tokens=8)
        report = run(once)
        assert len(killed) == 2
        assert report.deaths == 2
        assert report.counts.done == 12
        assert store.batch(batch.id).totals.computed == 12
        assert {result.state for result in store.results(batch.id, 0, 20)} == {State.DONE}
    found = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == names


async def _worked(store: Store, batch: Batch, engine: Watched, output: Output, tell: object) -> Report:
    shape = shape_of(engine.capabilities, engine.identity)
    async with asyncio.timeout(100):
        return await work(
            store,
            [batch],
            engine,
            shape,
            outputs={batch.id: output},
            options=Options(tick_s=0.02),
            tell=tell,  # type: ignore[arg-type]
        )
