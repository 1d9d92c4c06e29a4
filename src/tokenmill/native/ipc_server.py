"""IPC server of the worker: a thread that talks to the clients and tokenizes their prompts.

The compute thread takes messages from `inbox` and queues its own with `post`; it never waits for a client. Queued
messages go out after `send`, which the compute thread calls just before it enters llama.cpp: llama.cpp runs without the
GIL, so the two threads do not compete for it. Grammars and JSON schemas are compiled on a third thread (compiler.py).
"""

import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tokenmill.engine.engine import Request
from tokenmill.engine.schema_bounds import CONTEXT_TOKENS
from tokenmill.errors import EngineError, RequestRefused, TokenmillError
from tokenmill.native import protocol
from tokenmill.native.compiler import Compiler
from tokenmill.native.constraints.constraints import Constraint
from tokenmill.native.constraints.grammar import is_constrained

MAX_UNSENT_BYTES = 64 << 20  # a client that reads too slowly is disconnected, and its requests are cancelled
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request and the tokens of its prompt."""

    client: int
    number: int
    request: Request
    tokens: tuple[int, ...]
    arrived_s: float
    steps: int = 0  # steps that the engine had finished at arrival
    constraint: Constraint | None = None  # compiled, and not shared with another request
    branches: tuple[int, ...] = ()  # positions at which later prompts diverge from this one
    opened: str = ""  # the tag with which the template opened the model's reasoning at the end of the prompt


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled request; `number` None cancels all requests of the client."""

    client: int
    number: int | None


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A call of one of the worker's handlers."""

    client: int
    number: int
    name: str
    arguments: dict[str, Any]


InboundMessage = SubmittedRequest | Cancelled | ControlCall


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The tokens of a request's prompt, and what `SubmittedRequest` has about it."""

    tokens: tuple[int, ...]
    branches: tuple[int, ...] = ()
    opened: str = ""


PrepareRequest = Callable[[Request], PreparedPrompt]
"""Prepares a request; raises TokenmillError if it is invalid."""


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    has_handshake: bool = False


class IpcServer:
    """Serves clients on a Unix socket, on its own thread, until `close`."""

    def __init__(self, path: Path, heartbeat: Callable[[], protocol.Heartbeat], terminate: Callable[[], None]) -> None:
        self.inbox: SimpleQueue[InboundMessage | None] = SimpleQueue()  # None: only wake the compute thread
        self._heartbeat = heartbeat
        self._terminate = terminate
        self._clients: dict[int, _Client] = {}
        self._accepted = 0
        self._outbox: deque[tuple[int | None, dict[str, Any]]] = deque()
        self._hello: protocol.Handshake | None = None
        self._prepare: PrepareRequest | None = None
        self._compiler: Compiler | None = None
        self._compiling: dict[tuple[int, int], SubmittedRequest] = {}  # by client and number; used by this thread alone
        self._compiled: deque[tuple[SubmittedRequest, Constraint | TokenmillError]] = deque()
        self._loading: dict[str, Any] = {"loading": None, "detail": "starting"}
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Python's own handlers wait until llama.cpp returns, up to a minute; this pipe is written immediately.
        self._signals, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._listener = _listen(path)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._thread.start()

    # ---- called by the compute thread

    def loading(self, share: float | None, detail: str) -> None:
        """Report load progress, 0 to 1, to all clients."""
        self._loading = {"loading": share, "detail": detail}
        self.post(None, self._loading)
        self.send()

    def open(self, hello: protocol.Handshake, prepare: PrepareRequest, compiler: Compiler | None = None) -> None:
        """Accept requests from now on and send every client the handshake. A later call replaces it for new clients.

        Without a compiler, the compute thread compiles grammars and JSON schemas itself, without limits.
        """
        self._hello = hello
        self._prepare = prepare
        self._compiler = compiler
        self._wake_up()

    def post(self, client: int | None, message: dict[str, Any]) -> None:
        """Queue a message for one client or, with None, for all. It is sent by `send` or with the next heartbeat."""
        self._outbox.append((client, message))

    def send(self) -> None:
        """Wake the IPC thread to send all queued messages."""
        if self._outbox:
            self._wake_up()

    def close(self) -> None:
        """Send queued messages, for two seconds at most, and stop the thread."""
        self._stopping = True
        self._wake_up()
        self._thread.join(timeout=2)

    # ---- the thread

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping or any(client.unsent for client in self._clients.values()) or self._outbox:
            for key, events in self._selector.select(timeout=max(0.0, due - time.monotonic())):
                self._serve(key, events)
            if time.monotonic() >= due:
                due = time.monotonic() + protocol.HEARTBEAT_S
                if self._hello is not None:
                    self._outbox.append((None, self._heartbeat_message()))
                if self._stopping:
                    self._deliver()
                    return
            self._take_compiled()
            self._send_handshakes()
            self._deliver()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj == self._wake:
            os.eventfd_read(self._wake)
        elif key.fileobj == self._signals:
            if signal.SIGTERM in os.read(self._signals, 4096):
                self._terminate()
        else:
            number: int = key.data
            if events & selectors.EVENT_READ:
                self._receive(number)
            if events & selectors.EVENT_WRITE and number in self._clients:
                self._send(number)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._accepted += 1
        number = self._accepted  # numbers are never reused
        self._clients[number] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, number)
        if self._hello is None:
            self._queue(number, self._loading)

    def _send_handshakes(self) -> None:
        for number, client in list(self._clients.items()):
            if self._hello is not None and not client.has_handshake:
                client.has_handshake = True
                self._queue(number, self._heartbeat_message())  # first, so that a connected client knows the counters
                self._queue(number, {"hello": protocol.HELLO.dump_python(self._hello, mode="json")})

    def _heartbeat_message(self) -> dict[str, Any]:
        return {"beat": protocol.HEARTBEAT.dump_python(self._heartbeat(), mode="json")}

    def _receive(self, number: int) -> None:
        client = self._clients[number]
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(client.received) > protocol.MAX_LINE_BYTES:
            self._disconnect(number)
            return
        client.received += data
        if b"\n" not in data:
            return
        *lines, rest = client.received.split(b"\n")
        client.received = rest
        for text in lines:
            if text:
                self._handle(number, bytes(text))

    def _handle(self, client: int, text: bytes) -> None:
        number = 0
        try:
            message = protocol.read(text)
            if "cancel" in message:
                cancelled = int(message["cancel"])
                if self._compiling.pop((client, cancelled), None) is None:
                    self.inbox.put(Cancelled(client, cancelled))
            elif "call" in message:
                number = int(message["call"])
                self.inbox.put(ControlCall(client, number, str(message["name"]), dict(message.get("with") or {})))
            elif "submit" in message:
                number = int(message["submit"])
                self._submit(client, number, message["request"])
            else:
                raise EngineError(f"the engine's socket carries something else: {text[:60]!r}")
        except TokenmillError as error:
            self._queue(client, protocol.failure(number, error))
        except protocol.MALFORMED:
            self._queue(client, protocol.failure(number, RequestRefused(f"not understood: {text[:60]!r}")))

    def _submit(self, client: int, number: int, body: Any) -> None:
        if self._prepare is None or self._hello is None:
            raise EngineError("the engine is still loading", hint="wait for its hello")
        arrived_s = time.monotonic()
        steps = self._heartbeat().counters.steps or 0
        request = protocol.request_of(body)
        prompt = self._prepare(request)
        submitted = SubmittedRequest(
            client, number, request, prompt.tokens, arrived_s, steps, branches=prompt.branches, opened=prompt.opened
        )
        if self._compiler is None or not is_constrained(request.sampling):
            self.inbox.put(submitted)
            return
        context_tokens = self._hello.identity.context or CONTEXT_TOKENS
        constraint = self._compiler.cached(request.sampling, context_tokens)
        if constraint is not None:
            self.inbox.put(replace(submitted, constraint=constraint))
            return
        self._compiling[client, number] = submitted
        self._compiler.compile(request.sampling, context_tokens, partial(self._finish_compile, submitted))

    def _finish_compile(self, submitted: SubmittedRequest, result: Constraint | TokenmillError) -> None:
        """Called by the compile thread."""
        self._compiled.append((submitted, result))
        self._wake_up()

    def _take_compiled(self) -> None:
        """Submit requests whose constraints are ready, unless they were cancelled meanwhile."""
        while self._compiled:
            submitted, result = self._compiled.popleft()
            if self._compiling.get((submitted.client, submitted.number)) is not submitted:
                continue
            del self._compiling[submitted.client, submitted.number]
            if isinstance(result, TokenmillError):
                self._queue(submitted.client, protocol.failure(submitted.number, result))
            else:
                self.inbox.put(replace(submitted, constraint=result))

    def _deliver(self) -> None:
        while self._outbox:
            number, message = self._outbox.popleft()
            for each in list(self._clients) if number is None else [number]:
                self._queue(each, message)
        for each in list(self._clients):
            self._send(each)

    def _queue(self, number: int, message: dict[str, Any]) -> None:
        if number in self._clients:  # else it has disconnected, and its requests were cancelled
            self._clients[number].unsent += protocol.line(message)

    def _send(self, number: int) -> None:
        client = self._clients[number]
        if client.unsent:
            try:
                del client.unsent[: client.socket.send(client.unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._disconnect(number)
                return
        if len(client.unsent) > MAX_UNSENT_BYTES:
            self._disconnect(number)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, number)

    def _disconnect(self, number: int) -> None:
        client = self._clients.pop(number)
        self._selector.unregister(client.socket)
        client.socket.close()
        self._compiling = {key: submitted for key, submitted in self._compiling.items() if key[0] != number}
        self.inbox.put(Cancelled(number, None))

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)


def _listen(path: Path) -> socket.socket:
    """Listen on a socket that only this user can access; a stale socket file is removed."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise EngineError(f"cannot listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    listener.listen(64)
    listener.setblocking(False)
    return listener
