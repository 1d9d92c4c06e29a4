"""An engine behind HTTP: llama-server, ik_llama.cpp, vLLM, or any server with an OpenAI-compatible API.

The server was started by tokenmill or was already running. When its process exits, every stream raises `EngineDied`
with the cause, and the engine object cannot be used again. Closing a stream closes its connection, which cancels the
request. The wire format is in request.py and response.py.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Chat,
    Counters,
    Engine,
    EngineState,
    EngineStatus,
    HttpApi,
    Identity,
    Liveness,
    Piece,
    Prompt,
    Request,
)
from tokenmill.engine.process.exit_status import engine_from_outside
from tokenmill.engine.process.process import Process
from tokenmill.engine.server import metrics
from tokenmill.engine.server.errors import is_loading, to_error
from tokenmill.engine.server.request import LLAMA, ServerCall, call_of, capabilities_of, chat_body
from tokenmill.engine.server.response import DONE, Collector, data_of, object_of
from tokenmill.engine.server.saved_slots import probe_saved_slots
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, RequestRefused, TokenmillError

_LOADING_RETRY_S = 0.25  # between requests to a server that is loading
_STATUS_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 20.0  # for the process to exit after its connection broke; a core dump takes time
_TAIL_LINES = 12
UNRESPONSIVE_S = 10.0  # a server that answers no request to /health for longer is unresponsive
SILENT_KILL_S = 60.0  # and is killed after this, if it was started here
_CHECK_S = 2.0  # between these requests


class ServerEngine(Engine):
    """A running server. Must be used in the event loop in which it was created."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        identity: Identity,
        api: HttpApi,
        *,
        process: Process | None = None,
        owned: bool = False,
        reports_cached: bool = True,
    ) -> None:
        """Use a server that is ready; an `owned` process is stopped on close."""
        self._client = client
        self._identity = identity
        self.api = api
        self.process = process
        self._owned = owned
        self._reports_cached = reports_cached
        self._saves_prefixes = False
        self._closing = False
        self.ended = asyncio.get_running_loop().create_future()
        self._silent_s = 0.0  # since /health was last answered
        watches = [] if process is None else [self._watch(process), self._watch_silence(process)]
        self._watching = [asyncio.create_task(watch) for watch in watches]

    # ---- interface of engines

    @property
    def identity(self) -> Identity:
        """Identity of the server."""
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the server."""
        return capabilities_of(self.api, reports_cached=self._reports_cached, saves_prefixes=self._saves_prefixes)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Yield the pieces of one request, then its answer. Closing the generator cancels the request."""
        call = call_of(request, self.api)
        collector = Collector(
            self.api.kind,
            isinstance(request.prompt, Chat),
            request.sampling.top_logprobs,
            request.max_tokens,
            request.slot,
        )
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        before = await self._counters_before()
        events = self._events(call)
        try:
            while (event := await self._next(events, deadline, request)) is not None:
                piece = collector.take(event)
                if piece is not None:
                    yield piece
        finally:
            await events.aclose()
        if not collector.finished:
            raise await self._lost("the stream ended before the answer was complete")
        yield await self._answer(collector, before)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the chat template applied."""
        if isinstance(prompt, tuple):
            return prompt
        if self.api.kind in LLAMA:
            if isinstance(prompt, Chat):
                prompt = str((await self.ask("POST", "/apply-template", chat_body(prompt)))["prompt"])
            body: dict[str, Any] = {"content": prompt, "add_special": True, "parse_special": True}
        elif self.api.kind == "vllm":
            body = {"model": self.api.model, "add_special_tokens": not isinstance(prompt, Chat)}
            body |= chat_body(prompt) if isinstance(prompt, Chat) else {"prompt": prompt}
        else:
            raise RequestRefused("this server has no tokenize endpoint", hint="use llama.cpp's server or vLLM")
        return tuple((await self.ask("POST", "/tokenize", body))["tokens"])

    async def status(self) -> EngineStatus:
        """Return the current state and counters."""
        if self._closing or self.ended.done():
            detail = str(self.ended.result()) if self.ended.done() else None
            return EngineStatus("stopped" if self._closing else "failed", self._identity, Counters(), detail)
        state, detail = await self._health()
        counters = await self.counters() if state == "ready" else None
        return EngineStatus(state, self._identity, counters or Counters(), detail)

    async def close(self) -> None:
        """Stop the server if this object started it and it is not detached; otherwise only disconnect."""
        if self._closing:
            return
        self._closing = True
        for task in self._watching:
            task.cancel()
        if self.process is not None:
            if self._owned:
                await self.process.stop()
            else:
                self.process.stop_watching()
        await self._client.aclose()

    async def stop(self) -> None:
        """Stop the server's process, also if it is detached."""
        self._owned = True
        await self.close()

    @property
    def liveness(self) -> Liveness:
        """Whether the server answers requests to /health."""
        if self.ended.done():
            return "failed"
        return "unresponsive" if self._silent_s > UNRESPONSIVE_S else "up"

    @property
    def last_error(self) -> TokenmillError | None:
        """Why the server ended, or that it is unresponsive."""
        if self.ended.done():
            return self.ended.result()
        return EngineDied(self._silence(), code="engine_unresponsive") if self.liveness == "unresponsive" else None

    @property
    def http_api(self) -> HttpApi:
        """How to call the HTTP API at `identity.address`."""
        return self.api

    # ---- optional operations

    async def verify_saved_slots(self, folder: Path) -> tuple[bool, str]:
        """Test whether a saved slot is reused; if it is, `capabilities.saves_prefixes` becomes true."""
        if self.api.kind not in LLAMA or self.api.slots is None:
            return False, "only llama.cpp and ik_llama.cpp servers save slots"
        works, details = await probe_saved_slots(self, self._slot_action, folder=folder)
        self._saves_prefixes = self._saves_prefixes or works
        return works, details

    async def save_slot(self, slot: int, name: str) -> int:
        """Save the state of a slot to a file in the server's slot folder; returns its number of tokens."""
        self._need_verified_slots()
        return int((await self._slot_action(slot, "save", name))["n_saved"])

    async def restore_slot(self, slot: int, name: str) -> int:
        """Load the saved state of a slot; returns its number of tokens."""
        self._need_verified_slots()
        return int((await self._slot_action(slot, "restore", name))["n_restored"])

    async def _slot_action(self, slot: int, action: str, file: str | None) -> dict[str, Any]:
        body = {} if file is None else {"filename": file}
        return await self.ask("POST", f"/slots/{slot}?action={action}", body)

    def _need_verified_slots(self) -> None:
        if not self._saves_prefixes:
            raise EngineError(
                "saved slots have not been verified on this server", hint="call verify_saved_slots() first"
            )

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Forward a /v1/embeddings request; RequestRefused if the server does not support embeddings."""
        return await self.ask("POST", "/v1/embeddings", dict(body) | {"model": self.api.model})

    # ---- beyond the interface of engines

    async def counters(self) -> Counters | None:
        """Return the server's counters; None if it has none."""
        text = await self._text("/metrics")
        if self.api.kind == "vllm":
            return metrics.vllm_counters(metrics.samples_of(text)) if text else None
        if self.api.kind not in LLAMA:
            return None
        slots = await self._text("/slots")
        known = [slot for slot in _list(slots) if isinstance(slot, dict)] if slots else None
        return metrics.llama_counters(metrics.samples_of(text or ""), known)

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call an API endpoint that does not stream; returns the JSON object, or raises the server's error."""
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise await self._lost(_reason(error)) from error
        if response.status_code != httpx.codes.OK:
            raise to_error(response.status_code, response.text)
        return object_of(response.text)

    # ---- private

    async def _events(self, call: ServerCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of one answer; retries while the server is loading."""
        while True:
            async with self._post(call) as response:
                if response.status_code == httpx.codes.OK:
                    async for line in response.aiter_lines():
                        data = data_of(line)
                        if data == DONE:
                            return
                        if data:
                            yield _chunk(data)
                    return
                text = (await response.aread()).decode(errors="replace")
            if not is_loading(response.status_code, text):
                raise to_error(response.status_code, text)
            await asyncio.sleep(_LOADING_RETRY_S)

    @asynccontextmanager
    async def _post(self, call: ServerCall) -> AsyncIterator[httpx.Response]:
        # No keep-alive: an idle connection closed by the server would look like a dead server.
        headers = {"Connection": "close"} if self.api.kind in LLAMA else {}
        async with self._client.stream("POST", call.path, json=call.body, headers=headers) as response:
            yield response

    async def _next(
        self, events: AsyncGenerator[dict[str, Any], None], deadline: float | None, request: Request
    ) -> dict[str, Any] | None:
        if self.ended.done():
            raise _copy(self.ended.result())
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(events, None)
        except TimeoutError as error:
            raise EngineTimeout(
                f"no answer within {request.timeout_s:g} s", hint="increase the timeout, or run fewer sequences"
            ) from error
        except httpx.TransportError as error:
            raise await self._lost(_reason(error)) from error

    async def _answer(self, collector: Collector, before: Counters | None) -> Answer:
        usage = collector.use()
        if usage.cached_tokens is not None or self.api.kind != "vllm":
            self._reports_cached = self._reports_cached and usage.cached_tokens is not None
            return collector.answer()
        if before is None:
            self._reports_cached = False  # from now on, derived from the counters before and after each request
            return collector.answer()
        after = await self.counters()
        cached = metrics.cached_between(before, after, usage.prompt_tokens) if after else None
        return collector.answer(cached)

    async def _counters_before(self) -> Counters | None:
        needed = self.api.kind == "vllm" and not self._reports_cached
        return await self.counters() if needed else None

    async def _lost(self, why: str) -> EngineDied:
        """Create the error for a broken connection, with the cause if the process died."""
        if self.process is not None:
            await asyncio.wait({self.ended}, timeout=_EXIT_TIMEOUT_S)
        if self.ended.done():
            return _copy(self.ended.result())
        return EngineDied(f"the connection to {self._identity.address} was lost: {why}", from_outside=None)

    async def _health(self) -> tuple[EngineState, str | None]:
        try:
            response = await self._client.get("/health", timeout=_STATUS_TIMEOUT_S)
        except httpx.TimeoutException:
            return "ready", f"did not answer /health within {_STATUS_TIMEOUT_S:g} s"
        except httpx.TransportError as error:
            return "failed", f"cannot be reached: {_reason(error)}"
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return "loading", response.text[:200]
        if response.is_server_error:
            return "failed", response.text[:200]
        return "ready", None  # including 404 from servers without /health

    async def _text(self, path: str) -> str | None:
        try:
            response = await self._client.get(path, timeout=_STATUS_TIMEOUT_S)
        except httpx.TransportError:
            return None
        return response.text if response.status_code == httpx.codes.OK else None

    async def _watch(self, process: Process) -> None:
        end = await process.wait()
        hung = self._silent_s > SILENT_KILL_S
        message = f"the engine at {self._identity.address} {f'hung: {self._silence()}' if hung else process.describe()}"
        outside = False if hung else engine_from_outside(end, self.api.kind)
        self.ended.set_result(EngineDied(message, hint=log_tail(process), from_outside=outside))

    async def _watch_silence(self, process: Process) -> None:
        """Kill a server that was started here and stops answering /health; any answer counts, also an error."""
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while not self.ended.done():
            await asyncio.sleep(_CHECK_S)
            began_s = loop.time()
            try:
                await self._client.get("/health", timeout=_STATUS_TIMEOUT_S)
            except httpx.TransportError:
                late_s = loop.time() - began_s - 2 * _STATUS_TIMEOUT_S  # this process did not run
                answered_s = min(loop.time(), answered_s + max(0.0, late_s))
            else:
                answered_s = loop.time()
            self._silent_s = loop.time() - answered_s
            if self._owned and self._silent_s > SILENT_KILL_S:
                await process.kill()
                return

    def _silence(self) -> str:
        return f"it has not answered /health for {self._silent_s:.0f} s"


def log_tail(process: Process) -> str | None:
    """The end of a process's log, for the hint of an error; None if it is empty."""
    lines = process.tail(_TAIL_LINES)
    return f"last lines of {process.log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else None


def _chunk(data: str) -> dict[str, Any]:
    chunk = object_of(data)
    if "error" in chunk or ("message" in chunk and "choices" not in chunk):
        inner = chunk.get("error", chunk)
        code = inner.get("code") if isinstance(inner, dict) else None
        raise to_error(code if isinstance(code, int) else 500, data)
    return chunk


def _list(text: str) -> list[Any]:
    return list(object_of(f'{{"list": {text}}}')["list"])


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _copy(error: EngineError) -> EngineDied:
    """Copy the error, because each stream must raise its own exception."""
    outside = isinstance(error, EngineDied) and error.from_outside
    return EngineDied(error.message, hint=error.hint, from_outside=outside)
