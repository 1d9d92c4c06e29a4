"""A server with almost no overhead, for measuring a proxy: always sends the same answer immediately.

    python bench/gateway_upstream.py        prints its port, and serves until stdin is closed

A body with `"stream":true` is answered with TOKENS events, TOKEN_S apart, each with the time at which it was sent.
"""

import asyncio
import json
import sys
import time

import httptools
import uvloop

TOKENS = 50
TOKEN_S = 0.01
USAGE = {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
MESSAGE = {"role": "assistant", "content": "The answer is always the same, and it comes at once."}
ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "trivial",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": USAGE,
}
MODELS = {"object": "list", "data": [{"id": "trivial", "object": "model", "created": 0, "owned_by": "bench"}]}
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(status: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


PAGES = {
    b"/v1/chat/completions": whole("200 OK", ANSWER),
    b"/v1/models": whole("200 OK", MODELS),
    b"/health": whole("200 OK", {"status": "ok"}),
}
NOTHING = whole("404 Not Found", {"error": {"message": "nothing here"}})


class Trivial(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if b'"stream":true' in self.body.replace(b" ", b""):
            self.streaming = asyncio.create_task(self.stream())
        else:
            self.transport.write(PAGES.get(self.url, NOTHING))

    async def stream(self) -> None:
        self.transport.write(STREAM)
        for number in range(TOKENS):
            await asyncio.sleep(TOKEN_S)
            self.event({"content": f" {time.monotonic_ns()}"} | ({"role": "assistant"} if not number else {}))
        self.event({}, "stop")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, delta: object, finish: str | None = None) -> None:
        chunk = {
            "id": "chatcmpl-0",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "trivial",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        if finish:
            chunk["usage"] = USAGE
        self.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Trivial, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
