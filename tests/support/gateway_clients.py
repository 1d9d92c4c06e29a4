"""Well-behaved and misbehaving clients of a gateway with a fake engine."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from support import patient
from support.fake_engine import CAPABILITIES, FakeEngine
from support.gateway import Served, config_in, fake_engines, served
from tokenmill.engine.engine import Capabilities

LIMIT_S = 120.0


class InOrder(FakeEngine):
    """One that works in the order of arrival."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, interactive_first=False)


@contextmanager
def faked(
    folder: Path, *, in_order: bool = False, slots: int = 4, **settings: Any
) -> Iterator[tuple[Served, FakeEngine]]:
    """A gateway before one fake engine."""
    made: list[FakeEngine] = []

    def make() -> list[tuple[str, FakeEngine]]:
        made.append(InOrder(slots=slots) if in_order else FakeEngine(slots=slots))
        return [("fake", made[0])]

    with served(fake_engines(make), config_in(folder, **settings)) as gateway:
        yield gateway, made[0]


def ask(gateway: Served, text: str, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    """A completion, whole."""
    given = {"model": "fake", "prompt": text, **more}
    return patient.post(f"{gateway.url}/v1/completions", json=given, headers=headers)


def in_background(work: Callable[[], httpx.Response]) -> tuple[threading.Thread, list[httpx.Response]]:
    box: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    return thread, box


def at_work(gateway: Served, engine: FakeEngine, prompts: int) -> None:
    """Wait until a number of prompts are inside the engine."""

    async def wait() -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(engine.at_work) != prompts:
                await asyncio.sleep(0.002)

    gateway.call(wait())


def open_gate(gateway: Served, engine: FakeEngine) -> None:
    """Let gated prompts through from now on."""

    async def go() -> None:
        engine.gate_open.set()

    gateway.call(go())


def until(holds: Callable[[], bool]) -> None:
    """Something comes true in the gateway's thread; it is looked at again and again."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def connected(gateway: Served, *parts: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT_S)
    for part in parts:
        connection.sendall(part)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    connection.close()
    return got


def post_bytes(data: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    """A whole request as it goes over the wire."""
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + data
