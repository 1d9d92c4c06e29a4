"""Two real engines on one batch: no head is computed on both."""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.jobs_store import submitted
from support.native_engine import native, plan_for, run
from support.pool_engines import hand, run_test_pool
from tokenmill.engine.engine import Answer, Capabilities, Engine, EngineStatus, Identity, Piece, Request
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.pool import PoolReport
from tokenmill.model.synthetic import generate
from tokenmill.native.client import NativeEngine

RULES = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(20))
HEADS, JOBS = 6, 4


class Noting(ForwardingEngine):
    """A real engine of which every prompt is noted."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine: Engine = engine
        self.ended = engine.ended
        self.prompts: list[str] = []

    @property
    def inner(self) -> Engine:
        return self._engine

    @property
    def identity(self) -> Identity:
        return self._engine.identity

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        assert isinstance(request.prompt, str)
        self.prompts.append(request.prompt)
        async for event in self._engine.stream(request):
            yield event

    async def status(self) -> EngineStatus:
        return await self._engine.status()

    async def close(self) -> None:
        await self._engine.close()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {"layers": 2, "embed": 256}), path)
    return path


def test_each_head_is_computed_on_one_of_two_engines(moe: Path, tmp_path: Path) -> None:
    engines: list[Noting] = []

    async def work() -> PoolReport:
        plan = plan_for(moe, context=2048, sequences=2)
        async with AsyncExitStack() as stack:
            for name in ("one", "two"):
                started = await stack.enter_async_context(native(moe, tmp_path / name, plan=plan, name=name))
                engines.append(Noting(started))
            return await run_test_pool(store, [batch], [hand(f"e{at}", engine) for at, engine in enumerate(engines)])

    prompts = [f"Digest {number % HEADS}. {RULES} Question {number}:" for number in range(HEADS * JOBS)]
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", prompts, max_tokens=4, temperature=0)
        report = run(work)
        now = store.batch(batch.id)
    assert now.finished
    assert now.counts.done == now.totals.computed == report.total.answers == HEADS * JOBS
    lines = [json.loads(line) for line in (tmp_path / "jobs.out").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"{at}-{prompt}"[:500] for at, prompt in enumerate(prompts, 1)]
    heads = [{prompt.partition(".")[0] for prompt in engine.prompts} for engine in engines]
    assert not heads[0] & heads[1]
    assert len(heads[0] | heads[1]) == HEADS
    assert all(heads)
    for each in report.members:
        assert each.report is not None
        assert each.report.minimum is not None
        assert each.report.minimum.tokens <= each.report.tokens.computed <= 1.05 * each.report.minimum.tokens
