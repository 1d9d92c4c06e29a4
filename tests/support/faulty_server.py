"""A server with OpenAI's protocol for faults that a real one does not have on demand, in its own thread.

`behaves` decides the response to a chat:

    ok          an answer, whole or as a stream          half        a stream that ends early
    502, ...    that status                              role        a stream that ends before its first token
    refuses     a 400 with its own message               silent      no response
    busy        a 429 with Retry-After: 7                endless     a stream that does not end
    sorry       a stream that ends with the server's own error event
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from support.gateway import Engines
from tokenmill.config import Config, EngineConfig
from tokenmill.gateway.serving import EngineSpec, started_engines, state_for
from tokenmill.gateway.state import GatewayState

LIMIT_S = 120.0
CHAT = {"model": "alias", "messages": [{"role": "user", "content": "count"}], "max_tokens": 5}
WORDS = ("one", " two", " three")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nServer: faulty\r\n\r\n"
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "model": "upstream-name", "choices": [choice]}).encode() + b"\n\n"


WHOLE_STREAM = (
    event({"role": "assistant", "content": None})
    + b"".join(event({"content": word}) for word in WORDS)
    + event({}, "stop")
)
USAGE_EVENT = b"data: " + json.dumps({"id": "c", "choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"
TOO_LONG = b"""{"error": {"code": 400, "message": "request (9 tokens) exceeds the available context size (8 tokens)",
"type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}}"""  # as sent by llama-server
SORRY = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "upstream-name",
        "odd": "kept",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}],
        "usage": USAGE,
    }
).encode()


@dataclass
class FaultyServer:
    """One server."""

    behaves: str = "ok"
    healthy: bool = True
    keeps: bool = True  # connections, after an answer
    dies_after: int | None = None  # number of chats; at the next one it drops all connections and stops listening
    port: int = 0
    asked: list[tuple[str, bytes]] = field(default_factory=list)  # headers and bodies of chats
    left: threading.Event = field(default_factory=threading.Event)  # a client disconnected early
    came: threading.Event = field(default_factory=threading.Event)  # a chat has arrived
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Listen, on the same port as before."""
        ready = threading.Event()

        async def live() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._end.wait()
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(live()))
        self._thread.start()
        assert ready.wait(LIMIT_S)

    def end(self) -> None:
        """Drop all connections and refuse new ones."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer) and self.keeps:
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = await reader.readexactly(lengths[0]) if lengths else b""
        path = head.split(" ", 2)[1]
        if path == "/v1/models":
            writer.write(_whole(200, json.dumps({"data": [{"id": "m", "object": "model"}]}).encode()))
        elif path == "/health":
            if self.behaves == "silent":
                await asyncio.sleep(LIMIT_S)
            writer.write(_whole(200 if self.healthy else 500, b"{}"))
        elif path != "/v1/chat/completions":
            writer.write(_whole(404, b"{}"))
        else:
            self.asked.append((head, body))
            self.came.set()
            if self.dies_after is not None and len(self.asked) > self.dies_after:
                self._end.set()
                await asyncio.sleep(LIMIT_S)
            return await self._chat(json.loads(body), reader, writer)
        await writer.drain()
        return True

    async def _chat(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.behaves == "silent":
            await asyncio.sleep(LIMIT_S)
        elif self.behaves.isdigit():
            writer.write(_whole(int(self.behaves), b'{"error": {"message": "it does not work"}}'))
        elif self.behaves == "refuses":
            writer.write(_whole(400, b'{"error": {"message": "own words", "code": "odd"}}'))
        elif self.behaves == "too long":
            writer.write(_whole(400, TOO_LONG))
        elif self.behaves == "busy":
            writer.write(_whole(429, b'{"error": {"message": "later"}}', "Retry-After: 7\r\n"))
        elif not body.get("stream"):
            answer = _whole(200, ANSWER, "X-Odd: yes\r\nSet-Cookie: a=b\r\n")
            writer.write(answer[:-20] if self.behaves == "half" else answer)
            return self.behaves == "ok"
        else:
            return await self._stream(body, reader, writer)
        await writer.drain()
        return True

    async def _stream(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM)
        if self.behaves == "role":
            writer.write(chunk(WHOLE_STREAM.split(b"\n\n")[0] + b"\n\n"))
            await writer.drain()
            writer.close()  # with what was written
            return False
        if self.behaves == "half":
            writer.write(chunk(b"\n\n".join(WHOLE_STREAM.split(b"\n\n")[:3]) + b"\n\n"))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return False
        if self.behaves == "endless":
            await self._endless(reader, writer)
            return False
        for part in WHOLE_STREAM.split(b"\n\n")[:-1]:
            writer.write(chunk(part + b"\n\n"))
        if self.behaves == "sorry":
            writer.write(chunk(SORRY))
        if (body.get("stream_options") or {}).get("include_usage"):
            writer.write(chunk(USAGE_EVENT))
        writer.write(chunk(DONE) + chunk(b""))
        await writer.drain()
        return True

    async def _endless(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.ensure_future(reader.read(1))
        while not gone.done():
            writer.write(chunk(event({"content": "more"})))
            await asyncio.wait({gone}, timeout=0.01)
        with suppress(ConnectionError):
            gone.result()
        self.left.set()


def _whole(status: int, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


@contextmanager
def faulty(behaves: str = "ok") -> Iterator[FaultyServer]:
    """A server on a free port."""
    server = FaultyServer(behaves)
    server.begin()
    try:
        yield server
    finally:
        server.end()


def engines_at(*servers: FaultyServer, key_env: str | None = None) -> Engines:
    """Engine configurations for servers, named first, second, ..."""

    @asynccontextmanager
    async def up(config: Config) -> AsyncIterator[GatewayState]:
        settings = replace(EngineConfig(), api_key_env=key_env)
        wanted = [
            EngineSpec(name, ("alias",), settings, url=server.url)
            for name, server in zip(("first", "second"), servers, strict=False)
        ]
        async with started_engines(wanted, config) as (engines, ups):
            yield state_for(config, engines, ups)

    return up
