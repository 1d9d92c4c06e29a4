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
START_S = 1500.0  # 50 s on two idle cores, minutes on busy or slow ones
LIMIT_S = 300.0  # for an answer


@dataclass(frozen=True, slots=True)
class Served:
    """The engine, with the progress of its start."""

    engine: RestartingEngine
    plan: Plan
    seen: tuple[LoadProgress, ...]

    @property
    def server(self) -> ServerEngine:
        """The current process."""
        assert isinstance(self.engine.inner, ServerEngine)
        return self.engine.inner

    @property
    def log(self) -> str:
        """The log of the current process."""
        assert self.server.process is not None
        return self.server.process.log.read_text()

    async def counters(self) -> Counters:
        """The current counters of vLLM."""
        return (await self.engine.status()).counters


async def serve(model: Path, python: Path, state: Path) -> Served:
    """Plan a model for the CPUs of this machine and serve it."""
    plan = make(probe(), read(model), Goal(context=CONTEXT, sequences=LANES, engine="vllm", cpu_only=True))
    assert plan.fits
    seen: list[LoadProgress] = []
    # vLLM polls: on all cores, it would block the test until the last token.
    config = EngineConfig(kind="vllm", binary=str(python), port=0, nice=10)
    async with asyncio.timeout(START_S):
        engine = await start_restarting(
            plan, model_path=model, config=config, state=state, name="tiny", progress=seen.append
        )
    return Served(engine, plan, tuple(seen))
