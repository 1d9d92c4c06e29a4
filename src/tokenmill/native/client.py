"""The native engine seen from outside: a worker process of ours behind a Unix socket.

One life of it: when the worker dies or hangs, every stream gets `EngineDied` with the cause and the object is spent;
restarting it is up to `RestartingEngine`. Several clients may share a worker; only the one that started it ends it.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    EngineState,
    EngineStatus,
    Identity,
    KvLayout,
    Piece,
    Prompt,
    Request,
    Runtime,
    Usage,
    answer,
)
from tokenmill.engine.process.exit_status import engine_from_outside
from tokenmill.engine.process.process import Process
from tokenmill.errors import EngineDied, EngineError, TokenmillError, from_wire
from tokenmill.native import protocol

SILENCE_S = 1.0  # without a pulse for so long, its status says so
_LAST_LINES = 5

OnLoading = Callable[[float | None, str], None]
"""Told how far the load is, 0 to 1, and what is being done."""
Inbox = asyncio.Queue[dict[str, Any] | TokenmillError]


class NativeEngine(Engine):
    """A connection to a worker that has said hello."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        process: Process | None = None,
        owned: bool = True,
        step_limit_s: float | None = None,
        loading: OnLoading | None = None,
    ) -> None:
        """Take over a fresh connection; `owned` processes are ended with it."""
        self._writer = writer
        self._process = process
        self._owned = owned
        self._loading = loading
        self._step_limit_s = step_limit_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Inbox] = {}
        self._greeted: asyncio.Future[protocol.Handshake] = asyncio.get_running_loop().create_future()
        self._beat = protocol.Beat(None, Counters())
        self._heard_s = asyncio.get_running_loop().time()
        self._hung: str | None = None
        self._closing = False
        self.ended = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        self._watching = asyncio.create_task(self._watch())

    @staticmethod
    async def connect(
        socket: Path,
        *,
        process: Process | None = None,
        owned: bool = True,
        step_limit_s: float | None = None,
        loading: OnLoading | None = None,
    ) -> "NativeEngine":
        """Connect to a worker and wait until it can answer."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(socket), limit=protocol.MOST_LINE_BYTES)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if process is None:
                    raise EngineError(f"no native engine answers at {socket}", hint="tokenmill engines") from error
                if not process.running:
                    raise await _failed_start(process) from error
                await asyncio.sleep(0.02)
        engine = NativeEngine(reader, writer, process=process, owned=owned, step_limit_s=step_limit_s, loading=loading)
        try:
            first: set[asyncio.Future[Any]] = {engine._greeted, engine.ended}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await engine.close()
            raise
        if engine.ended.done():
            await engine.close()
            raise await _failed_start(process) if process is not None else engine.ended.result()
        return engine

    # ---- the protocol

    @property
    def hello(self) -> protocol.Handshake:
        """What the worker said of itself."""
        return self._greeted.result()

    @property
    def identity(self) -> Identity:
        """What answers."""
        return self.hello.identity

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self.hello.capabilities

    @property
    def runtime(self) -> Runtime:
        """Its threads, KV layout and buffers."""
        hello = self.hello
        return Runtime(hello.threads, hello.threads_batch, "per_slot" if hello.streams else "unified", hello.buffers)

    @property
    def beat(self) -> protocol.Beat:
        """Its last pulse."""
        return self._beat

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request; the last value is the answer. Closing the generator cancels."""
        number, inbox = self._expect()
        try:
            await self._send({"submit": number, "request": protocol.request_message(request)})
            while True:
                message = await self._next(number, inbox)
                if "piece" in message:
                    yield protocol.piece_of(message)
                else:
                    del self._waiting[number]
                    yield protocol.answer_of(message)
                    return
        finally:
            if self._waiting.pop(number, None) is not None and not self.ended.done():
                with suppress(EngineDied):
                    await self._send({"cancel": number})

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""
        return tuple(await self.call("tokenize", request=protocol.request_message(Request(prompt))))

    async def status(self) -> EngineStatus:
        """State and counters, as of its last pulse."""
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        state: EngineState = "stopped" if self._closing else "failed" if self.ended.done() else "ready"
        detail = str(self.ended.result()) if self.ended.done() else None
        if state == "ready" and silent_s > SILENCE_S:
            detail = f"has not been heard of for {silent_s:.1f} s"
        return EngineStatus(state, self.identity, self._beat.counters, detail)

    async def stop(self) -> None:
        """End the worker, whoever started it."""
        self._owned = True
        if self._process is None:
            await self.call("stop")
        await self.close()

    async def close(self) -> None:
        """Stop the worker if it is ours; else only hang up."""
        if self._closing:
            return
        self._closing = True
        self._watching.cancel()
        if self._process is not None and self._owned:
            await self._process.stop()
        elif self._process is not None:
            self._process.let_go()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.gather(self._reading, self._watching, return_exceptions=True)
        if not self._greeted.done():
            self._greeted.cancel()

    # ---- optional operations

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change both numbers of threads, from the next step on."""
        await self._change("threads", threads=threads, threads_batch=threads_batch)

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests, within what the context was built for."""
        await self._change("lanes", lanes=slots)

    async def set_context(self, **changes: object) -> None:
        """Build another context: cells, context, ubatch, batch, cache types, flash attention, threads, lanes, streams.

        UsageError if the model or the cells do not allow it; the context is then as before.
        """
        await self._change("context", **changes)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Build a context with the other KV layout; UsageError if the model or the cells do not allow it."""
        await self._change("context", streams=layout == "per_slot")

    async def _change(self, what: str, **changes: object) -> None:
        hello = protocol.HELLO.validate_python(await self.call(what, **changes))
        self._greeted = asyncio.get_running_loop().create_future()
        self._greeted.set_result(hello)

    async def pin_prefix(self, prompt: Prompt) -> Usage:
        """Compute a prefix once and keep it; returns its tokens and how many were cached already."""
        tokens = tuple(await self.call("pin", request=protocol.request_message(Request(prompt))))
        return (await answer(self, Request(tokens, max_tokens=0, priority="interactive"))).usage

    async def unpin_prefix(self, prompt: Prompt) -> None:
        """Allow a pinned prefix to be evicted."""
        await self.call("unpin", request=protocol.request_message(Request(prompt)))

    async def save_prefix(self, prompt: Prompt, path: Path) -> int:
        """Write the state of a computed prefix to a file; returns its tokens."""
        return int(await self.call("save", request=protocol.request_message(Request(prompt)), path=str(path)))

    async def restore_prefix(self, path: Path, *, pin: bool = True) -> int:
        """Load a saved prefix; returns its tokens. ForeignState if it is of another model, build or cache type."""
        return int(await self.call("restore", path=str(path), pin=pin))

    async def cached_prefixes(self) -> list[dict[str, Any]]:
        """The prefix tree in the KV cache, node by node."""
        return list(await self.call("heads"))

    async def running_requests(self) -> list[dict[str, Any]]:
        """What each sequence in flight is doing, oldest first."""
        return list(await self.call("at_work"))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Ask the worker itself for something."""
        number, inbox = self._expect()
        try:
            await self._send({"call": number, "name": name, "with": arguments})
            return (await self._next(number, inbox))["value"]
        finally:
            self._waiting.pop(number, None)

    # ---- the connection

    def _expect(self) -> tuple[int, Inbox]:
        if self.ended.done():
            raise self.ended.result()
        if self._closing:
            raise EngineError("the engine has been stopped")
        number = next(self._numbers)
        inbox: Inbox = asyncio.Queue()
        self._waiting[number] = inbox
        return number, inbox

    async def _next(self, number: int, inbox: Inbox) -> dict[str, Any]:
        message = await inbox.get()
        if isinstance(message, TokenmillError):
            self._waiting.pop(number, None)
            raise message
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(protocol.line(message))
            await self._writer.drain()
        except OSError as error:
            if self._closing:
                raise EngineDied("the engine was stopped", from_outside=True) from error
            raise (await asyncio.shield(self.ended)) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand every message to whoever waits for it, to the end of the connection."""
        try:
            while text := await reader.readline():
                self._hand_on(protocol.read(text))
        except (OSError, ValueError, TokenmillError):
            pass  # told like an end below: the worker is of no use any more
        if self._closing:
            error = EngineDied("the engine was stopped", from_outside=True)
        else:
            error = await self._cause()
            self.ended.set_result(error)
        for inbox in self._waiting.values():
            inbox.put_nowait(error)

    def _hand_on(self, message: dict[str, Any]) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if "beat" in message:
            self._beat = protocol.BEAT.validate_python(message["beat"])
        elif "hello" in message:
            if not self._greeted.done():
                self._greeted.set_result(protocol.HELLO.validate_python(message["hello"]))
        elif "loading" in message:
            if self._loading is not None:
                self._loading(message["loading"], str(message.get("detail")))
        else:
            number = next(message[key] for key in ("piece", "answer", "result", "error") if key in message)
            inbox = self._waiting.get(number)
            if inbox is not None:
                inbox.put_nowait(from_wire(message) if "error" in message else message)

    async def _watch(self) -> None:
        """The step watchdog: a worker of ours whose step does not end, or that fell silent for as long, is killed."""
        limit = self._step_limit_s
        loop = asyncio.get_running_loop()
        while limit is not None and self._process is not None:
            pause_s = min(protocol.BEAT_S, limit / 4)
            began_s = loop.time()
            await asyncio.sleep(pause_s)
            # While we did not run ourselves (stopped with Ctrl-Z, or starved), it may have spoken, and nobody listened.
            absent_s = max(0.0, loop.time() - began_s - 2 * pause_s)
            self._heard_s = min(loop.time(), self._heard_s + absent_s)
            silent_s = loop.time() - self._heard_s
            step_s = None if self._beat.step_age_s is None else self._beat.step_age_s + silent_s
            if step_s is not None and step_s > limit:
                self._hung = f"hung: a step had been running for {step_s:.1f} s, and {limit:g} s are allowed"
            elif silent_s > max(limit, SILENCE_S) and self._greeted.done():
                self._hung = f"hung: nothing was heard of it for {silent_s:.1f} s"
            if self._hung is not None:
                await self._process.kill()
                return

    async def _cause(self) -> EngineDied:
        if self._process is None:
            hint = "tokenmill engines shows whether it runs"
            return EngineDied("the native engine closed the connection", hint=hint, from_outside=None)
        end = await self._process.wait()
        outside = engine_from_outside(end, "native") if self._hung is None else False
        how = self._hung or self._process.words()
        return EngineDied(f"the native engine {how}", hint=_said(self._process), from_outside=outside)


async def _failed_start(process: Process) -> EngineError:
    """Why a worker ended before it said hello: its own words if it left any."""
    await process.wait()
    for text in reversed(process.tail(_LAST_LINES)):
        if text.startswith('{"error"'):
            said = from_wire(json.loads(text))
            return said if isinstance(said, EngineError) else EngineError(said.message, hint=said.hint)
    message = f"while starting, the native engine {process.words()}"
    return EngineDied(message, hint=_said(process), from_outside=engine_from_outside(process.exit, "native"))


def _said(process: Process) -> str | None:
    lines = process.tail(_LAST_LINES)
    return f"its last words, in {process.log}:\n" + "\n".join(f"  {text}" for text in lines) if lines else None
