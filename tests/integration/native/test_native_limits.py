"""Grammars and JSON schemas that would exhaust memory or time are refused without delaying other requests."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.native_engine import chat, native, run
from tokenmill.engine.engine import Request, Sampling, answer
from tokenmill.engine.process.identity import descendants
from tokenmill.errors import EngineError, RequestRefused, UsageError
from tokenmill.native.client import NativeEngine
from tokenmill.native.memory_limit import HEADROOM_BYTES
from tokenmill.units import GIB, MIB

HUGE = 2**31 - 1
MEMORY_BOMB = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{count}}}$"} for count in range(30)]}
REFUSED: list[dict[str, Any]] = [
    {"type": "array", "minItems": HUGE},
    {"type": "array", "items": {"type": "array", "minItems": 10_001}},
    MEMORY_BOMB,
    {"enum": []},
    {"$ref": "#"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "string", "pattern": "^a$", "enum": ["b"]},
    {"type": "object", "required": ["a"], "properties": {"a": False}},
]
REFUSED_GRAMMARS = [
    f'root ::= {"(" * 200_000}"a"{")" * 200_000}',
    "root ::= x0\n" + "".join(f"x{n} ::= (x{n + 1} x{n + 1} [a-z]){{0,9}}\n" for n in range(60)) + 'x60 ::= "a"',
    "root ::= [^\\x00-\\U0010FFFF]",
]


def shaped(schema: dict[str, Any], tokens: int = 12) -> Request:
    return replace(chat("Hello?", tokens=tokens), sampling=Sampling(temperature=0, json_schema=json.dumps(schema)))


def pid_of(engine: NativeEngine) -> int:
    assert engine.identity.pid is not None
    return engine.identity.pid


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def checker_of(engine: NativeEngine) -> int:
    """The process in which the worker has grammars and schemas compiled first."""
    (found,) = (
        pid for pid in descendants(pid_of(engine)) if b"compile_check" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


async def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        await asyncio.sleep(0.01)  # the kernel stops one thread after the other


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    await stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_huge_counts_are_answered_or_refused_and_the_worker_lives(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            before = peak_bytes(pid_of(engine))
            integers = {"type": "array", "items": {"type": "integer"}, "maxItems": HUGE}
            found = await answer(engine, shaped(integers, tokens=40))
            assert isinstance(json.loads(found.text), list)
            text = {"type": "string", "maxLength": HUGE, "pattern": "^a{0,1000000000}$"}
            assert (await answer(engine, shaped(text))).text.startswith('"')
            repeated = replace(chat("Hello?"), sampling=Sampling(temperature=0, grammar='root ::= "a"{0,1000000000}'))
            assert set((await answer(engine, repeated)).text) == {"a"}
            long = Sampling(temperature=0, grammar=f'root ::= "{"a" * 400_000}"{{0,2000}}')
            assert set((await answer(engine, replace(chat("Hello?"), sampling=long))).text) <= {"a"}
            for schema in REFUSED:
                with pytest.raises(RequestRefused) as caught:
                    await answer(engine, shaped(schema))
                assert (caught.value.code, bool(caught.value.message)) == ("invalid_request", True), schema
            for grammar in REFUSED_GRAMMARS:
                with pytest.raises(RequestRefused):
                    await answer(engine, replace(chat("Hello?"), sampling=Sampling(grammar=grammar)))
            assert (await answer(engine, shaped({"type": "boolean"}))).text in ("true", "false")
            assert peak_bytes(pid_of(engine)) < before + 512 * MIB

    run(work)


def test_requests_do_not_wait_for_the_compile_of_another(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            first = await answer(engine, shaped({"type": "boolean"}))
            async with stopped(checker_of(engine)):
                waiting = asyncio.create_task(answer(engine, shaped({"type": "null"})))
                long = {"type": "string", "minLength": 3000}
                cancelled = asyncio.create_task(answer(engine, shaped(long, tokens=900)))
                assert (await answer(engine, shaped({"type": "boolean"}))).text == first.text
                assert (await answer(engine, chat("Hello?"))).text
                assert not waiting.done()
                cancelled.cancel()
            assert (await waiting).text == "null"
            assert (await answer(engine, shaped({"const": 1}))).text == "1"  # the cancelled one has been compiled
            assert await engine.running_requests() == []

    run(work)


def test_a_killed_compile_fails_its_request_alone(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            await answer(engine, shaped({"type": "boolean"}))
            checker = checker_of(engine)
            await stop(checker)
            waiting = asyncio.create_task(answer(engine, shaped({"type": "null"})))
            assert (await answer(engine, chat("Hello?"))).text  # sent after it, so the worker has both
            os.kill(checker, signal.SIGKILL)
            with pytest.raises(EngineError) as caught:
                await waiting
            assert not isinstance(caught.value, RequestRefused)
            assert (await answer(engine, shaped({"type": "null"}))).text == "null"

    run(work)


def test_the_worker_has_limits_of_its_own(smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with native(smollm2_path, tmp_path) as engine:
            folder = Path(f"/proc/{pid_of(engine)}")
            assert (folder / "oom_score_adj").read_text().strip() == "1000"
            limits = (folder / "limits").read_text()
            line = next(line for line in limits.splitlines() if line.startswith("Max data size"))
            assert HEADROOM_BYTES < int(line.split()[3]) < HEADROOM_BYTES + 2 * GIB
            for threads, threads_batch in ((100_000, 1), (1, 100_000), (0, 1)):
                with pytest.raises(UsageError):
                    await engine.set_threads(threads, threads_batch)
            with pytest.raises(UsageError):
                await engine.set_context(threads=100_000)
            assert (engine.hello.threads, engine.hello.threads_batch) == (1, 1)
            assert (await answer(engine, chat("Hello?"))).text

    run(work)
