"""vLLM on this machine's CPUs, planned and started by tokenmill."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Counters
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.restart import RestartingEngine
from tokenmill.engine.server.client import ServerEngine
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.native.launching import start_restarting
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

CONTEXT, LANES = 4096, 4
START_S = 1500.0  # 50 s on two idle cores, minutes beside other work or on slow ones
LIMIT_S = 300.0  # for an answer


@dataclass(frozen=True, slots=True)
class Served:
    """The engine with what was seen while it started."""

    engine: RestartingEngine
    plan: Plan
    seen: tuple[LoadProgress, ...]

    @property
    def server(self) -> ServerEngine:
        """The life it has now."""
        assert isinstance(self.engine.inner, ServerEngine)
        return self.engine.inner

    @property
    def log(self) -> str:
        """What this life has said."""
        assert self.server.process is not None
        return self.server.process.log.read_text()

    async def counters(self) -> Counters:
        """What vLLM counts now."""
        return (await self.engine.status()).counters


async def serve(model: Path, python: Path, state: Path) -> Served:
    """Plan a model for this machine's processors and serve it."""
    plan = make(probe(), read(model), Goal(context=CONTEXT, sequences=LANES, engine="vllm", cpu_only=True))
    assert plan.fits
    seen: list[LoadProgress] = []
    # Its processes poll: where they have all cores, who waits for an answer may not run until the last token is out.
    config = EngineConfig(kind="vllm", binary=str(python), port=0, nice=10)
    async with asyncio.timeout(START_S):
        engine = await start_restarting(
            plan, model_path=model, config=config, state=state, name="tiny", progress=seen.append
        )
    return Served(engine, plan, tuple(seen))
