"""Failing servers: every failure raises one of tokenmill's errors, and timeouts apply."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.servers import END, STREAM, answer, events, misbehaving, run, until
from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Answer, Chat, Request
from tokenmill.engine.engine import answer as whole
from tokenmill.engine.server.client import ServerEngine
from tokenmill.engine.start import attach
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, RequestRefused, TokenmillError, TooLong

HI = Request(Chat(({"role": "user", "content": "hi"},)))
MODELS = answer(200, {"data": [{"id": "m", "owned_by": "someone"}]})
NOT_HERE = answer(404, {"error": {"message": "no"}})
LOADING = answer(503, {"error": {"message": "Loading model", "code": 503}})


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


USED = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
GOOD = [STREAM, events([piece("he"), piece("y", "stop"), USED, "[DONE]"]), END]

Play = Callable[[asyncio.StreamWriter], Awaitable[None]]


def plays(*parts: bytes) -> Play:
    async def play(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return play


async def with_server(
    play: Play, scene: Callable[[ServerEngine], Awaitable[None]], config: EngineConfig | None = None
) -> None:
    async def reply(line: str, writer: asyncio.StreamWriter) -> None:
        if line.startswith("POST"):
            await play(writer)
        else:
            writer.write(MODELS if "/v1/models" in line else NOT_HERE)

    async with misbehaving(reply) as url:
        engine = await attach(url, config or EngineConfig())
        try:
            assert engine.identity.kind == "url"
            await scene(engine)
        finally:
            await engine.close()


def test_a_good_server() -> None:
    async def scene(engine: ServerEngine) -> None:
        done = await whole(engine, HI)
        assert (done.text, done.usage.prompt_tokens, done.usage.cached_tokens) == ("hey", 5, None)
        assert not engine.capabilities.reports_cached_tokens, "that was seen just now"
        assert (await engine.status()).state == "ready", "it has no page for its health, but it answered"
        with pytest.raises(RequestRefused, match="tokenize"):
            await engine.tokenize("x")

    run(lambda: with_server(plays(*GOOD), scene))


@pytest.mark.parametrize(
    ("parts", "error", "word"),
    [
        ([answer(502, "<html>Bad Gateway</html>", "text/html")], EngineError, "502"),
        ([answer(429, {"error": {"message": "busy"}})], EngineError, "busy"),
        ([answer(400, {"error": {"message": "no such thing"}})], RequestRefused, "no such thing"),
        ([answer(401, {"error": {"message": "who?"}})], EngineError, "who?"),
        ([], EngineDied, "lost"),
        ([STREAM, events([piece("he")])], EngineDied, "lost"),
        ([STREAM, events([piece("he")]), b"ff\r\nhalf a chu"], EngineDied, "lost"),
        ([STREAM, events([piece("he")]), END], EngineDied, "before the answer was complete"),
        ([STREAM, events([piece("he"), "[DONE]"]), END], EngineDied, "before the answer was complete"),
        ([STREAM, events([piece("he"), "{broken"]), END], EngineError, "JSON"),
        ([STREAM, events([{"error": {"code": 500, "message": "slot gone"}}]), END], EngineError, "slot gone"),
        (
            [
                STREAM,
                events(
                    [
                        {
                            "error": {
                                "code": 400,
                                "message": "request (9 tokens) exceeds the available context size (8 tokens)",
                            }
                        }
                    ]
                ),
                END,
            ],
            TooLong,
            "9 tokens",
        ),
        ([STREAM, events([piece("hey", "stop"), "[DONE]"]), END], EngineError, "token usage"),
    ],
)
def test_failures(parts: list[bytes], error: type[TokenmillError], word: str) -> None:
    async def scene(engine: ServerEngine) -> None:
        with pytest.raises(error, match=word) as failed:
            await whole(engine, HI)
        assert type(failed.value) is error

    run(lambda: with_server(plays(*parts), scene))


def test_a_slow_answer_times_out_and_its_connection_is_closed() -> None:
    playing, closed = asyncio.Event(), asyncio.Event()

    async def play(writer: asyncio.StreamWriter) -> None:
        playing.set()
        writer.write(STREAM + events([piece("he")]))
        await writer.drain()
        while not writer.transport.is_closing():
            writer.write(b"8\r\n: ping\n\n\r\n")
            await asyncio.sleep(0.01)
        closed.set()

    async def scene(engine: ServerEngine) -> None:
        while not playing.is_set():  # on a slow machine its time may be over before it is connected
            with pytest.raises(EngineTimeout, match=r"0\.2 s"):
                await whole(engine, Request(HI.prompt, timeout_s=0.2))
        await closed.wait()

    run(lambda: with_server(play, scene))


def test_leaving_a_stream_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while not writer.transport.is_closing():
            writer.write(events([piece("more ")]))
            await asyncio.sleep(0.005)
        closed.set()

    async def scene(engine: ServerEngine) -> None:
        stream = engine.stream(HI)
        async for event in stream:
            assert not isinstance(event, Answer)
            break
        await stream.aclose()
        await closed.wait()

    run(lambda: with_server(play, scene))


def test_a_server_that_loads_is_waited_for() -> None:
    tries = 0

    async def play(writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await (plays(LOADING) if tries == 1 else plays(*GOOD))(writer)

    async def scene(engine: ServerEngine) -> None:
        assert (await whole(engine, HI)).text == "hey"
        assert tries == 2

    run(lambda: with_server(play, scene))


def test_a_key_goes_into_the_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "hidden-key")
    seen: list[str] = []

    async def scene() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            seen.append(head)
            writer.write(MODELS if "/v1/models" in head else NOT_HERE)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            engine = await attach(url, EngineConfig(api_key_env="THE_KEY"))
            assert "hidden-key" not in repr(engine.identity)
            await engine.close()

    run(scene)
    assert all("authorization: bearer hidden-key" in head.lower() for head in seen)


def test_vllm_without_cached_tokens_in_its_usage_is_asked_for_its_counters() -> None:
    metrics = iter([(100, 40), (105, 44), (300, 200), (900, 300)])

    async def reply(line: str, writer: asyncio.StreamWriter) -> None:
        if line.startswith("POST"):
            await plays(*GOOD)(writer)
        elif "/metrics" in line:
            prompt, cached = next(metrics)
            writer.write(
                answer(
                    200, f"vllm:prompt_tokens_total {prompt}\nvllm:prompt_tokens_cached_total {cached}\n", "text/plain"
                )
            )
        elif "/version" in line:
            writer.write(answer(200, {"version": "0.10.1"}))
        else:
            writer.write(answer(200, {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 64}]}))

    async def scene() -> None:
        async with misbehaving(reply) as url:
            engine = await attach(url, EngineConfig())
            assert (engine.identity.kind, engine.identity.build, engine.identity.context) == ("vllm", "vLLM 0.10.1", 64)
            assert engine.api.guided
            assert (await whole(engine, HI)).usage.cached_tokens is None, "it was not known to be silent"
            assert (await whole(engine, HI)).usage.cached_tokens == 4
            assert (await whole(engine, HI)).usage.cached_tokens is None, (
                "the prompt of another client was counted, too"
            )
            await engine.close()

    run(scene)


def test_nobody_there() -> None:
    async def scene() -> None:
        async with misbehaving(lambda _line, _writer: asyncio.sleep(0)) as url:
            pass
        with pytest.raises(EngineError, match="nothing answers"):
            await attach(url, EngineConfig())

    run(scene)


def test_what_is_no_server_of_that_protocol() -> None:
    async def reply(_line: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, "<html>hello</html>", "text/html"))

    async def scene() -> None:
        async with misbehaving(reply) as url:
            with pytest.raises(EngineError, match="no /v1/models"):
                await attach(url, EngineConfig())

    run(scene)


def test_an_attached_server_that_went_away() -> None:
    async def scene() -> None:
        async def reply(line: str, writer: asyncio.StreamWriter) -> None:
            writer.write(MODELS if "/v1/models" in line else NOT_HERE)

        async with misbehaving(reply) as url:
            engine = await attach(url, EngineConfig())
        with pytest.raises(EngineDied, match="was lost"):
            await whole(engine, HI)

        async def failed() -> bool:
            return (await engine.status()).state == "failed"

        await until(failed)
        await engine.close()
        assert (await engine.status()).state == "stopped"

    run(scene)
