"""A native engine for tests: the real worker process with a real small model."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from tokenmill.config import Config, EngineConfig
from tokenmill.engine.engine import Chat, Request, Sampling
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.native.builds.finished import FROM_IK, with_build
from tokenmill.native.builds.finished import read as read_build
from tokenmill.native.client import NativeEngine
from tokenmill.native.start import start
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

GREEDY = Sampling(temperature=0.0)
LIMIT_S = 250.0
T = TypeVar("T")


@cache
def this_machine() -> Machine:
    return probe(Path.cwd())


def plan_for(model: Path, *, context: int = 1024, sequences: int = 4, ubatch: int | None = None) -> Plan:
    """A plan for this machine; one thread, because several wait for each other where others use the cores too."""
    goal = Goal(context=context, sequences=sequences, ubatch=ubatch, threads=1, threads_batch=1)
    return make(this_machine(), read(str(model)), goal_for(goal))


def with_test_build(config: EngineConfig) -> EngineConfig:
    """A configuration that uses the build in TOKENMILL_TEST_BUILD, if there is one."""
    build = read_build(Path(os.environ.get("TOKENMILL_TEST_BUILD", "none")))
    on_ik = build is not None and build.kind == "ik_llama.cpp" and config.library is None
    return replace(config, library=FROM_IK) if on_ik else config


@asynccontextmanager
async def native(
    model: Path, state: Path, *, plan: Plan | None = None, config: EngineConfig | None = None, name: str = "test"
) -> AsyncIterator[NativeEngine]:
    """A started engine that is gone afterwards, whatever happened to it."""
    used = with_build(with_test_build(config or EngineConfig()), Config().engines_path)
    engine = await start(plan or plan_for(model), model_path=model, config=used, state=state, name=name)
    try:
        yield engine
    finally:
        await engine.close()


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a test's coroutine, with an end to all waiting."""

    async def limited() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await work()

    return asyncio.run(limited())


def chat(question: str, *, system: str = "You are a helpful assistant.", tokens: int = 16) -> Request:
    """A greedy conversation of one turn."""
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    return Request(Chat(messages), GREEDY, max_tokens=tokens)


def interactive(request: Request) -> Request:
    return replace(request, priority="interactive")
