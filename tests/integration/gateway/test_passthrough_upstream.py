"""The HTTP client for servers, with all kinds of responses."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.servers import misbehaving, run
from tokenmill.gateway.backends.http_client import Response, Upstream, UpstreamLost, UpstreamUnreachable

OK = b"HTTP/1.1 200 OK\r\n"
MOST = 1 << 26


def answered(data: bytes, read: Callable[[Response], Awaitable[None]]) -> None:
    """Get bytes from a server, which closes the connection after them, and read them."""

    async def reply(_line: str, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async def scene() -> None:
        async with misbehaving(reply) as url:
            upstream = Upstream(url)
            response = await upstream.send("POST", "/x", b"{}")
            try:
                await read(response)
            finally:
                response.close()
                upstream.close()

    run(scene)


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 5\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        OK + b"\r\nhello",  # until the connection ends
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_bodies(data: bytes) -> None:
    async def read(response: Response) -> None:
        assert (response.status, await response.all(MOST)) == (200, b"hello")

    answered(data, read)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "closed the connection"),
        (OK, "closed the connection"),
        (b"this is no HTTP at all\r\n\r\n", "malformed HTTP"),
        (OK + b"X: " + b"a" * 70_000, "headers are too long"),
        (OK + b"Content-Length: 9\r\n\r\nhello", "closed the connection"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "closed the connection"),
    ],
)
def test_what_breaks_off_is_lost(data: bytes, words: str) -> None:
    async def read(response: Response) -> None:
        await response.all(MOST)

    with pytest.raises(UpstreamLost, match=words):
        answered(data, read)


def test_an_answer_that_is_too_large() -> None:
    async def read(response: Response) -> None:
        await response.all(3)

    with pytest.raises(UpstreamLost, match="larger than 3 bytes"):
        answered(OK + b"Content-Length: 5\r\n\r\nhello", read)


def test_nothing_listens() -> None:
    async def scene() -> None:
        async def reply(_line: str, _writer: asyncio.StreamWriter) -> None:
            pass

        async with misbehaving(reply) as url:
            pass
        with pytest.raises(UpstreamUnreachable):
            await Upstream(url).send("GET", "/health")

    run(scene)


def test_a_slow_consumer_pauses_the_server() -> None:
    """A large body waits at the server, not here."""
    size = 64 * 1024 * 1024
    written = 0

    async def reply(_line: str, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            writer.write(b"a" * 65536)
            await writer.drain()
            written += 65536

    async def scene() -> None:
        async with misbehaving(reply) as url:
            upstream = Upstream(url)
            response = await upstream.send("GET", "/large")
            before = -1
            while before != written:  # until it stands still
                before = written
                await asyncio.sleep(0.1)
            assert written < size // 2
            assert len(await response.all(MOST)) == size
            response.close()
            upstream.close()

    run(scene)


def test_what_was_not_asked_for_is_not_the_next_answer() -> None:
    """A server that sends a second response, immediately or later: the connection is not reused."""
    answer = OK + b"Content-Length: 5\r\n\r\nhello"
    stray = OK + b"Content-Length: 5\r\n\r\nwrong"
    connections = 0
    chattered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer + stray if number == 1 else answer)
            await writer.drain()
            if number == 2:
                writer.write(stray)
                await writer.drain()
                await reader.read()  # until it is hung up on
                chattered.set()
                break
            if number == 3:
                break
        writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for number in (1, 2, 3):
            response = await upstream.send("GET", "/x")
            assert await response.all(MOST) == b"hello"
            response.close()
            assert connections == number
            if number == 2:
                await chattered.wait()
        upstream.close()
        server.close()
        await server.wait_closed()

    run(scene)
