"""Client of a native worker: `NativeEngine` implements the engine protocol over a Unix socket.

When the worker dies or hangs, every stream raises `EngineDied` with the cause, and the object cannot be used again;
`RestartingEngine` starts a new one. Several clients may share a worker; only the one that started it stops it.
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
    Liveness,
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
from tokenmill.native.step_limits import ReadWatch, StepTimeLimits

_LAST_LINES = 5

OnLoading = Callable[[float | None, str], None]
"""Called with the load progress, 0 to 1, and the current step of the load."""
Inbox = asyncio.Queue[dict[str, Any] | TokenmillError]


class NativeEngine(Engine):
    """A connection to a worker."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        process: Process | None = None,
        owned: bool = True,
        limits: StepTimeLimits | None = None,
        loading: OnLoading | None = None,
    ) -> None:
        """Use a new connection; `close` stops the process if it is `owned`. Without `limits` it is never killed."""
        self._writer = writer
        self._process = process
        self._owned = owned
        self._loading = loading
        self._limits = limits or StepTimeLimits()
        self._kills = limits is not None and process is not None
        self._unresponsive_s = self._limits.unresponsive_s  # raised if a longer step ends
        self._stalled: str | None = None  # why it is unresponsive
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Inbox] = {}
        self._unanswered: set[int] = set()  # interactive requests without a piece
        self._handshake: asyncio.Future[protocol.Handshake] = asyncio.get_running_loop().create_future()
        self._heartbeat = protocol.Heartbeat(None, Counters())
        self._last_message_s = asyncio.get_running_loop().time()
        self._hung: str | None = None
        self._closing = False
        self.ended = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(reader))
        self._watchdog = asyncio.create_task(self._watch())

    @staticmethod
    async def connect(
        socket: Path,
        *,
        process: Process | None = None,
        owned: bool = True,
        limits: StepTimeLimits | None = None,
        loading: OnLoading | None = None,
    ) -> "NativeEngine":
        """Connect to a worker and wait until it is ready."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(socket), limit=protocol.MAX_LINE_BYTES)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if process is None:
                    raise EngineError(f"no native engine answers at {socket}", hint="tokenmill engines") from error
                if not process.running:
                    raise await _failed_start(process) from error
                await asyncio.sleep(0.02)
        engine = NativeEngine(reader, writer, process=process, owned=owned, limits=limits, loading=loading)
        try:
            first: set[asyncio.Future[Any]] = {engine._handshake, engine.ended}
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
        """The handshake of the worker."""
        return self._handshake.result()

    @property
    def identity(self) -> Identity:
        """Identity of the worker."""
        return self.hello.identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the worker."""
        return self.hello.capabilities

    @property
    def runtime(self) -> Runtime:
        """Threads, KV layout and buffers of the worker."""
        hello = self.hello
        return Runtime(hello.threads, hello.threads_batch, "per_slot" if hello.streams else "unified", hello.buffers)

    @property
    def heartbeat(self) -> protocol.Heartbeat:
        """The last heartbeat."""
        return self._heartbeat

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Yield the pieces of one request, then its answer. Closing the generator cancels the request.

        While the engine is unresponsive, interactive requests without a piece fail; batch requests wait.
        """
        number, inbox = self._expect()
        try:
            if request.priority == "interactive":
                if self._stalled is not None:
                    raise self._unresponsive()
                self._unanswered.add(number)
            await self._send({"submit": number, "request": protocol.request_message(request)})
            while True:
                message = await self._next(number, inbox)
                self._unanswered.discard(number)
                if "piece" in message:
                    yield protocol.piece_of(message)
                else:
                    del self._waiting[number]
                    yield protocol.answer_of(message)
                    return
        finally:
            self._unanswered.discard(number)
            if self._waiting.pop(number, None) is not None and not self.ended.done():
                with suppress(EngineDied):
                    await self._send({"cancel": number})

    @property
    def liveness(self) -> Liveness:
        """Whether the worker answers, and makes progress."""
        if self.ended.done():
            return "failed"
        return "up" if self._stalled is None else "unresponsive"

    @property
    def last_error(self) -> TokenmillError | None:
        """Why the worker died, or why it is unresponsive."""
        if self.ended.done():
            return self.ended.result()
        return self._unresponsive() if self._stalled is not None else None

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the chat template applied."""
        if self._stalled is not None:
            raise self._unresponsive()
        return tuple(await self.call("tokenize", request=protocol.request_message(Request(prompt))))

    async def status(self) -> EngineStatus:
        """Return state and counters as of the last heartbeat."""
        if self._closing or self.ended.done():
            state: EngineState = "stopped" if self._closing else "failed"
            detail = str(self.ended.result()) if self.ended.done() else None
        else:
            state = "ready" if self._stalled is None else "unresponsive"
            detail = self._stalled
        return EngineStatus(state, self.identity, self._heartbeat.counters, detail)

    async def stop(self) -> None:
        """Stop the worker, even if another process started it."""
        self._owned = True
        if self._process is None:
            await self.call("stop")
        await self.close()

    async def close(self) -> None:
        """Stop the worker if it is owned; else only disconnect."""
        if self._closing:
            return
        self._closing = True
        self._watchdog.cancel()
        if self._process is not None and self._owned:
            await self._process.stop()
        elif self._process is not None:
            self._process.stop_watching()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.gather(self._reader, self._watchdog, return_exceptions=True)
        if not self._handshake.done():
            self._handshake.cancel()

    # ---- optional operations

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change the threads for decode and prefill from the next step on."""
        await self._change("threads", threads=threads, threads_batch=threads_batch)

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests, within what the context was built for."""
        await self._change("lanes", lanes=slots)

    async def set_context(self, **changes: object) -> None:
        """Build another context: cells, context, ubatch, batch, cache types, flash attention, threads, lanes, streams.

        UsageError if the model or the cells do not allow it; the context is then unchanged.
        """
        await self._change("context", **changes)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Build a context with the other KV layout; UsageError if the model or the cells do not allow it."""
        await self._change("context", streams=layout == "per_slot")

    async def _change(self, what: str, **changes: object) -> None:
        hello = protocol.HELLO.validate_python(await self.call(what, **changes))
        self._handshake = asyncio.get_running_loop().create_future()
        self._handshake.set_result(hello)

    async def pin_prefix(self, prompt: Prompt) -> Usage:
        """Compute a prefix once and keep it; returns its tokens and how many were cached already."""
        pinned = await self.call("pin", request=protocol.request_message(Request(prompt)))
        tokens = tuple(pinned["tokens"])
        if pinned["cached"] == len(tokens):
            return Usage(len(tokens), 0, len(tokens))
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
        return list(await self.call("prefixes"))

    async def running_requests(self) -> list[dict[str, Any]]:
        """Return the progress of each running sequence, oldest first."""
        return list(await self.call("running"))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a handler of the worker and return its result."""
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
        """Dispatch messages until the connection ends, then fail all pending calls."""
        try:
            while text := await reader.readline():
                self._dispatch(protocol.read(text))
        except (OSError, ValueError, TokenmillError):
            pass  # handled like the end of the connection: the worker cannot be used any more
        if self._closing:
            error = EngineDied("the engine was stopped", from_outside=True)
        else:
            error = await self._cause()
            self.ended.set_result(error)
        for inbox in self._waiting.values():
            inbox.put_nowait(error)

    def _dispatch(self, message: dict[str, Any]) -> None:
        self._last_message_s = asyncio.get_running_loop().time()
        if "beat" in message:
            before = self._heartbeat
            self._heartbeat = protocol.HEARTBEAT.validate_python(message["beat"])
            age_s = before.step_age_s or 0.0
            if age_s > self._unresponsive_s and self._heartbeat.counters.steps != before.counters.steps:
                self._unresponsive_s = 2 * age_s  # the step took longer than predicted, and ended
        elif "hello" in message:
            if not self._handshake.done():
                self._handshake.set_result(protocol.HELLO.validate_python(message["hello"]))
        elif "loading" in message:
            if self._loading is not None:
                self._loading(message["loading"], str(message.get("detail")))
        else:
            number = next(message[key] for key in ("piece", "answer", "result", "error") if key in message)
            inbox = self._waiting.get(number)
            if inbox is not None:
                inbox.put_nowait(from_wire(message) if "error" in message else message)

    async def _watch(self) -> None:
        """Notice a worker without heartbeats or with an endless step, and kill it at the limit if it is owned."""
        loop = asyncio.get_running_loop()
        reads = ReadWatch(self._process.pid.pid if self._process is not None else None)
        limits = self._limits
        pause_s = min(protocol.HEARTBEAT_S, limits.kill_s / 4)
        while True:
            began_s = loop.time()
            await asyncio.sleep(pause_s)
            # While this process did not run (stopped with Ctrl-Z, or starved), heartbeats may have arrived unread.
            absent_s = max(0.0, loop.time() - began_s - 2 * pause_s)
            self._last_message_s = min(loop.time(), self._last_message_s + absent_s)
            silent_s = loop.time() - self._last_message_s
            step_s = None if self._heartbeat.step_age_s is None else self._heartbeat.step_age_s + silent_s
            if step_s is not None and step_s > self._unresponsive_s / 2:
                step_s = min(step_s, reads.since_read_s())
            if step_s is not None and step_s > self._unresponsive_s:
                self._set_stalled(f"a step has been running for {step_s:.1f} s", step_s, limits.kill_s)
            elif silent_s > limits.silent_s and self._handshake.done():
                self._set_stalled(f"no heartbeat for {silent_s:.1f} s", silent_s, limits.silent_kill_s)
            else:
                self._stalled = None
            if self._hung is not None and self._process is not None:
                await self._process.kill()
                return

    def _set_stalled(self, why: str, for_s: float, kill_s: float) -> None:
        """Fail interactive requests that have no piece yet; batch requests and started streams wait."""
        self._stalled = why
        if self._kills and for_s > kill_s:
            self._hung = f"hung: {why}, and {kill_s:g} s are allowed"
        for number in self._unanswered:
            inbox = self._waiting.pop(number, None)
            if inbox is not None:
                inbox.put_nowait(self._unresponsive())
                self._writer.write(protocol.line({"cancel": number}))  # for a worker that continues
        self._unanswered.clear()

    def _unresponsive(self) -> EngineDied:
        message = f"the engine is unresponsive: {self._stalled}"
        hint = "retry later; if it does not recover, it is restarted"
        return EngineDied(message, hint=hint, from_outside=True, code="engine_unresponsive")

    async def _cause(self) -> EngineDied:
        if self._process is None:
            hint = "tokenmill engines shows whether it runs"
            return EngineDied("the native engine closed the connection", hint=hint, from_outside=None)
        end = await self._process.wait()
        outside = engine_from_outside(end, "native") if self._hung is None else False
        how = self._hung or self._process.describe()
        return EngineDied(f"the native engine {how}", hint=_log_tail(self._process), from_outside=outside)


async def _failed_start(process: Process) -> EngineError:
    """Return why a worker ended before its handshake, from the error in its log if there is one."""
    await process.wait()
    for text in reversed(process.tail(_LAST_LINES)):
        if text.startswith('{"error"'):
            reported = from_wire(json.loads(text))
            return reported if isinstance(reported, EngineError) else EngineError(reported.message, hint=reported.hint)
    message = f"while starting, the native engine {process.describe()}"
    return EngineDied(message, hint=_log_tail(process), from_outside=engine_from_outside(process.exit, "native"))


def _log_tail(process: Process) -> str | None:
    lines = process.tail(_LAST_LINES)
    return f"last lines of {process.log}:\n" + "\n".join(f"  {text}" for text in lines) if lines else None
