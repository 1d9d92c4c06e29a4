"""The worker's thread for everything that is not computing: its clients, their words, and their prompts' tokens.

The thread that computes takes finished orders from `inbox` and leaves what it has to say with `tell`; it never waits
for a client. What it has left goes out after `send`, for which it chooses the moment before it goes into llama.cpp:
that runs without Python's lock, and two threads that work in Python at once wait for each other. Prompts become tokens
here, while a step is computed there. Grammars and JSON schemas are compiled on a third thread (compiler.py).
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
from tokenmill.native.constraints import Constraint
from tokenmill.native.grammar import is_constrained

MOST_UNSENT_BYTES = 64 << 20  # of one client that does not read: it is let go, and its work with it
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request with its prompt's tokens."""

    client: int
    number: int
    request: Request
    tokens: tuple[int, ...]
    notes: tuple[str, ...]
    arrived_s: float
    steps: int = 0  # of the engine that had ended then
    constraint: Constraint | None = None  # compiled, for this request alone


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Work that nobody waits for any more; without a number all of a client's."""

    client: int
    number: int | None


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A question or an order to the engine itself."""

    client: int
    number: int
    name: str
    arguments: dict[str, Any]


InboundMessage = SubmittedRequest | Cancelled | ControlCall
PrepareRequest = Callable[[Request], tuple[tuple[int, ...], tuple[str, ...]]]
"""A request's tokens, and notes about them; raises what is wrong with it."""


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    greeted: bool = False


class IpcServer:
    """Listens at a socket until told to stop."""

    def __init__(self, path: Path, beat: Callable[[], protocol.Beat], terminate: Callable[[], None]) -> None:
        self.inbox: SimpleQueue[InboundMessage | None] = SimpleQueue()  # None: only look up
        self._beat = beat
        self._terminate = terminate
        self._clients: dict[int, _Client] = {}
        self._accepted = 0
        self._said: deque[tuple[int | None, dict[str, Any]]] = deque()
        self._hello: protocol.Handshake | None = None
        self._prepare: PrepareRequest | None = None
        self._compiler: Compiler | None = None
        self._compiling: dict[tuple[int, int], SubmittedRequest] = {}  # by client and number; used by this thread alone
        self._compiled: deque[tuple[SubmittedRequest, Constraint | TokenmillError]] = deque()
        self._loading: dict[str, Any] = {"loading": None, "detail": "starting"}
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Python's own handlers wait until llama.cpp returns, which may take a minute; this pipe is written at once.
        self._signals, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._listener = _listen(path)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._thread.start()

    # ---- called by the thread that computes

    def loading(self, share: float | None, detail: str) -> None:
        """Say how far the load is."""
        self._loading = {"loading": share, "detail": detail}
        self.tell(None, self._loading)
        self.send()

    def open(self, hello: protocol.Handshake, prepare: PrepareRequest, compiler: Compiler | None = None) -> None:
        """Accept requests from now on and greet every client. Again: with another hello.

        Without a compiler, the thread that computes compiles grammars and JSON schemas itself, without limits.
        """
        self._hello = hello
        self._prepare = prepare
        self._compiler = compiler
        self._wake_up()

    def tell(self, client: int | None, message: dict[str, Any]) -> None:
        """Leave a message for one client or for all, to go out after the next `send`, and with a beat at the latest."""
        self._said.append((client, message))

    def send(self) -> None:
        """Have everything sent that was left here."""
        if self._said:
            self._wake_up()

    def close(self) -> None:
        """Send what is left to be sent, for a moment at most, and stop."""
        self._stopping = True
        self._wake_up()
        self._thread.join(timeout=2)

    # ---- the thread

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping or any(client.unsent for client in self._clients.values()) or self._said:
            for key, events in self._selector.select(timeout=max(0.0, due - time.monotonic())):
                self._serve(key, events)
            if time.monotonic() >= due:
                due = time.monotonic() + protocol.BEAT_S
                if self._hello is not None:
                    self._said.append((None, self._pulse()))
                if self._stopping:
                    self._deliver()
                    return
            self._take_compiled()
            self._greet()
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
        number = self._accepted  # never that of a client that has gone
        self._clients[number] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, number)
        if self._hello is None:
            self._queue(number, self._loading)

    def _greet(self) -> None:
        for number, client in list(self._clients.items()):
            if self._hello is not None and not client.greeted:
                client.greeted = True
                self._queue(number, self._pulse())  # before it: who has been greeted knows the counters
                self._queue(number, {"hello": protocol.HELLO.dump_python(self._hello, mode="json")})

    def _pulse(self) -> dict[str, Any]:
        return {"beat": protocol.BEAT.dump_python(self._beat(), mode="json")}

    def _receive(self, number: int) -> None:
        client = self._clients[number]
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(client.unread) > protocol.MOST_LINE_BYTES:
            self._let_go(number)
            return
        client.unread += data
        if b"\n" not in data:
            return
        *lines, rest = client.unread.split(b"\n")
        client.unread = rest
        for text in lines:
            if text:
                self._obey(number, bytes(text))

    def _obey(self, client: int, text: bytes) -> None:
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
        steps = self._beat().counters.steps or 0
        request = protocol.request_of(body)
        tokens, notes = self._prepare(request)
        order = SubmittedRequest(client, number, request, tokens, notes, arrived_s, steps)
        if self._compiler is None or not is_constrained(request.sampling):
            self.inbox.put(order)
            return
        context_tokens = self._hello.identity.context or CONTEXT_TOKENS
        constraint = self._compiler.cached(request.sampling, context_tokens)
        if constraint is not None:
            self.inbox.put(replace(order, constraint=constraint))
            return
        self._compiling[client, number] = order
        self._compiler.compile(request.sampling, context_tokens, partial(self._finish_compile, order))

    def _finish_compile(self, order: SubmittedRequest, made: Constraint | TokenmillError) -> None:
        """Called by the compile thread."""
        self._compiled.append((order, made))
        self._wake_up()

    def _take_compiled(self) -> None:
        """Submit requests whose constraints are ready, unless they were cancelled meanwhile."""
        while self._compiled:
            order, made = self._compiled.popleft()
            if self._compiling.get((order.client, order.number)) is not order:
                continue
            del self._compiling[order.client, order.number]
            if isinstance(made, TokenmillError):
                self._queue(order.client, protocol.failure(order.number, made))
            else:
                self.inbox.put(replace(order, constraint=made))

    def _deliver(self) -> None:
        while self._said:
            number, message = self._said.popleft()
            for each in list(self._clients) if number is None else [number]:
                self._queue(each, message)
        for each in list(self._clients):
            self._send(each)

    def _queue(self, number: int, message: dict[str, Any]) -> None:
        if number in self._clients:  # else it has gone, and its work was cancelled
            self._clients[number].unsent += protocol.line(message)

    def _send(self, number: int) -> None:
        client = self._clients[number]
        if client.unsent:
            try:
                del client.unsent[: client.socket.send(client.unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._let_go(number)
                return
        if len(client.unsent) > MOST_UNSENT_BYTES:
            self._let_go(number)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, number)

    def _let_go(self, number: int) -> None:
        client = self._clients.pop(number)
        self._selector.unregister(client.socket)
        client.socket.close()
        self._compiling = {key: order for key, order in self._compiling.items() if key[0] != number}
        self.inbox.put(Cancelled(number, None))

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)


def _listen(path: Path) -> socket.socket:
    """A socket that only this user reaches; a dead one's remains are removed."""
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
