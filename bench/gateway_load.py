"""Sends requests to a gateway over persistent connections and measures their durations.

    python bench/gateway_load.py URL MODEL KEY whole|stream CONCURRENT SECONDS    prints one JSON object

`took`: milliseconds of an answer. `lag`: milliseconds from the server's write of a token to its arrival. Only medians
and percentiles are printed, because a line with every value would have several hundred KB.
"""

import asyncio
import json
import re
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvloop

WARM_S = 0.5
TOKEN = re.compile(rb'"content": ?" (\d+)"')


class Asking(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lags: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> "asyncio.Future[int]":
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = time.monotonic_ns()
        self.lags.extend((now - int(sent)) / 1e6 for sent in TOKEN.findall(body))

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(self.parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(str(exc)))


def request_for(url: str, model: str, key: str, *, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is always the same?"}],
            "max_tokens": 64,
            "stream": stream,
        },
        separators=(",", ":"),
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile; empty without values."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)]} if ordered else {}


async def load(url: str, request: bytes, at_once: int, seconds: float) -> dict[str, Any]:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    host = parts.hostname or ""
    port = parts.port or 80
    began_s = time.perf_counter() + WARM_S
    ends_s = began_s + seconds
    took_ms: list[float] = []
    lags_ms: list[float] = []
    statuses: dict[int, int] = {}

    async def one() -> None:
        _, asking = await loop.create_connection(Asking, host, port)
        while (start_s := time.perf_counter()) < ends_s:
            asking.lags.clear()
            status = await asking.ask(request)
            end_s = time.perf_counter()
            statuses[status] = statuses.get(status, 0) + 1
            if start_s >= began_s:
                lags_ms.extend(asking.lags)  # including a stream that took longer
                if end_s <= ends_s:
                    took_ms.append((end_s - start_s) * 1000)
        asking.transport.abort()

    await asyncio.gather(*(one() for _ in range(at_once)))
    return {
        "requests_s": len(took_ms) / seconds,
        "took": percentiles(took_ms),
        "lag": percentiles(lags_ms),
        "statuses": statuses,
    }


if __name__ == "__main__":
    to, wanted, key_, way, many, long = sys.argv[1:]
    asked = request_for(to, wanted, key_, stream=way == "stream")
    print(json.dumps(uvloop.run(load(to, asked, int(many), float(long)))))
