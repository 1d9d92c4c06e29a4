"""The embedded llama-server with a small plan, and a server that misbehaves on request."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

EMBEDDED = EngineConfig(kind="llama-server", port=0)


def small_plan(model: Path, *, context: int = 512, sequences: int = 2) -> Plan:
    """A plan for this machine on one thread: several threads on busy cores spin against each other."""
    goal = Goal(context=context, sequences=sequences, cpu_only=True, threads=1, threads_batch=1, ubatch=256)
    plan = make(probe(), read(str(model)), goal)
    assert plan.fits
    return plan


def run(scene: Callable[[], Awaitable[None]], limit_s: float = 200) -> None:
    """Run a scene with a time limit."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scene()

    asyncio.run(limited())


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition until it is true."""
    while not await true():
        await asyncio.sleep(0.01)


Reply = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
"""Receives the first line of a request, and writes the response."""


@asynccontextmanager
async def misbehaving(reply: Reply) -> AsyncIterator[str]:
    """Start a server that replies with `reply`; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0
            )
            await reader.readexactly(length)
            await reply(head.splitlines()[0], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answer(status: int, body: object, kind: str = "application/json") -> bytes:
    """A complete HTTP response."""
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + data


STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
END = b"0\r\n\r\n"


def events(values: Iterable[object]) -> bytes:
    """Server-sent events as one chunk of the transfer encoding."""
    text = "".join(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n" for value in values).encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"
