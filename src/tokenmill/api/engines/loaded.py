"""`load`: an engine with blocking methods, for scripts and notebooks.

The engine runs in processes of its own; its calls run in an event loop on a background thread (`background.py`), so
every method can be called from any thread, and where an event loop is already running. For work that must survive a
crash, use `tokenmill.run`.
"""

import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

from tokenmill.api.background import Background, BackgroundTask, Emit
from tokenmill.api.display import display
from tokenmill.api.engines.choose import choose_engine, open_engine, plan_for
from tokenmill.api.options import EngineArguments, engine_options
from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import OnProgress, Progress
from tokenmill.config import Config
from tokenmill.engine.engine import Answer, Piece, Request, answer
from tokenmill.engine.engine import Engine as AsyncEngine
from tokenmill.errors import RequestRefused, TokenmillError, UsageError
from tokenmill.jobs.ingest.line import call_from
from tokenmill.planner.plan import Plan
from tokenmill.storage.private import private_folder
from tokenmill.units import number_of

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]
"""A user's message, a list of OpenAI messages, or an OpenAI request body."""
_DEFAULT_SLOTS = 8  # of a server that does not report how many it has
_IN_FLIGHT = 2  # requests for each slot: one runs, one waits
_UNREAD = 8  # requests for each slot whose answers may wait for an earlier one


def load(
    model: str | Path | None = None,
    *,
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[EngineArguments],
) -> "Engine":
    """Plan, load and warm an engine; use it as a context manager, or call `close`.

    `model`: as for `tokenmill.plan`, but its files must be here; default: smollm2, which is downloaded if it is
    missing. The options are those of `tokenmill.plan`. Without options, a running engine of the same model is used;
    with `engine="http://..."`, a server. `on_progress` receives `tokenmill.api.progress` events in the calling thread;
    default: a progress bar on a terminal or in a notebook.

    Raises DoesNotFit if the plan does not fit this machine. Ctrl-C stops a load and leaves no process behind.
    """
    asked = engine_options(options)
    settings = configuration(config)
    with ExitStack() as stack:
        report = stack.enter_context(display()) if on_progress is None else on_progress
        choice = choose_engine(None if model is None else str(model), asked, settings, report)
        planned = plan_for(choice, asked, settings) if choice.starts else None
        cleanup = AsyncExitStack()
        folder = cleanup.enter_context(_engine_folder(settings.state_path))

        async def opened(emit: Emit[Progress]) -> AsyncEngine:
            return await cleanup.enter_async_context(open_engine(choice, planned, folder, emit))

        background = Background().start()
        try:
            engine = background.report(opened, report)
            return Engine(engine, planned.plan if planned is not None else None, background, cleanup)
        except BaseException:
            background.close(cleanup.aclose)
            raise


class Engine:
    """A loaded engine; `tokenmill.load` makes it.

    The keyword arguments of `chat`, `complete`, `stream` and `map` are the keys of an OpenAI request body: max_tokens,
    temperature, seed, stop, response_format, tools and so on. RequestRefused names a key that is unknown or a value
    that is out of range. All methods are thread-safe. Ctrl-C cancels the request that the calling thread waits for.

    An engine that is not closed is closed when it is garbage-collected or when Python exits.
    """

    def __init__(self, engine: AsyncEngine, plan: Plan | None, background: Background, cleanup: AsyncExitStack) -> None:
        """Use `load`."""
        self._engine = engine
        self._plan = plan
        self._background = background
        self._close = weakref.finalize(self, background.close, cleanup.aclose)

    @property
    def plan(self) -> Plan | None:
        """The plan of the engine; None if it was running already."""
        return self._plan

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._engine.identity.model

    @property
    def slots(self) -> int | None:
        """The number of requests that run concurrently; None if a server does not report it."""
        return self._engine.identity.slots

    @property
    def context(self) -> int | None:
        """The longest sequence in tokens, prompt and answer together; None if a server does not report it."""
        return self._engine.identity.context

    def chat(self, messages: str | Messages, **body: Any) -> Answer:
        """The answer to a user's message or to a list of OpenAI messages."""
        return self._answer({"messages": _messages(messages)}, body)

    def complete(self, prompt: str | Sequence[int], **body: Any) -> Answer:
        """The continuation of a text or of a list of tokens, without a chat template."""
        tokens = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        return self._answer({"prompt": list(prompt) if tokens else prompt}, body)

    def stream(self, prompt: Prompt, **body: Any) -> Generator[str, None, Answer]:
        """The pieces of an answer as they are generated; closing the iterator cancels the request.

        The return value of the generator is the `Answer`: `answer = yield from engine.stream(...)`.
        """
        request = call_from(_body(prompt), body).request("interactive")
        engine = self._engine

        async def pieces(emit: Emit[str]) -> Answer:
            return await _stream(engine, request, emit)

        return self._background.events(pieces)

    @overload
    def map(
        self, prompts: Iterable[Prompt], *, errors: Literal["raise"] = "raise", **body: Any
    ) -> Iterator[Answer]: ...

    @overload
    def map(
        self, prompts: Iterable[Prompt], *, errors: Literal["return"], **body: Any
    ) -> Iterator[Answer | TokenmillError]: ...

    def map(
        self, prompts: Iterable[Prompt], *, errors: Literal["raise", "return"] = "raise", **body: Any
    ) -> Iterator[Answer | TokenmillError] | Iterator[Answer]:
        """The answers to many prompts, in order; all slots work concurrently, and shared prefixes are computed once.

        `prompts`: messages of a user, lists of OpenAI messages, OpenAI request bodies, or lines of an OpenAI batch
        file; keys of a body override the keyword arguments. They are read as slots become free, in the calling thread.

        If a request fails, its error is raised in place of the answer, and the later requests are cancelled. With
        `errors="return"` the error is yielded in place of the answer, and `map` continues. A request that was in
        flight when the engine's process died fails with EngineDied; `tokenmill.run` retries such requests.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f"errors must be 'raise' or 'return' (got {errors!r})")
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise UsageError(
                f"prompts must be an iterable of prompts (got {type(prompts).__name__})",
                hint='for example ["Say hello."]; chat and complete take one prompt',
            )
        return self._map(prompts, body, raises=errors == "raise")

    def close(self) -> None:
        """Cancel requests in flight and stop the engine; an engine that `load` did not start is left running."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        slots = "" if self.slots is None else f": {number_of(self.slots, 'slot')}"
        context = "" if self.context is None else f", context {self.context:,}"
        return f"<tokenmill.Engine {self.model}{slots}{context}{state}>"

    def _answer(self, prompt: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
        request = call_from({**body, **prompt}).request("interactive")
        return self._background.run(answer(self._engine, request))

    def _map(
        self, prompts: Iterable[Prompt], defaults: Mapping[str, Any], *, raises: bool
    ) -> Iterator[Answer | TokenmillError]:
        def submit(prompt: Prompt) -> BackgroundTask[Answer]:
            request = call_from(_body(prompt), defaults).request("batch")
            return self._background.submit(answer(self._engine, request))

        with _InOrder(prompts, submit, self.slots or _DEFAULT_SLOTS) as requests:
            for result in requests.results():
                if raises and isinstance(result, TokenmillError):
                    raise result
                yield result


class _InOrder:
    """Requests in flight whose results are wanted in the order of their prompts.

    An answer may wait for an earlier, longer one; meanwhile further requests are started, up to `_UNREAD` for each
    slot.
    """

    def __init__(
        self, prompts: Iterable[Prompt], submit: Callable[[Prompt], BackgroundTask[Answer]], slots: int
    ) -> None:
        self._prompts: Iterator[Prompt] | None = iter(prompts)
        self._submit = submit
        self._most_in_flight = _IN_FLIGHT * slots
        self._most_unread = _UNREAD * slots
        self._in_flight = 0
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._unread: deque[BackgroundTask[Answer] | TokenmillError] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        tasks = [task for task in self._unread if isinstance(task, BackgroundTask)]
        for task in tasks:
            task.request_cancel()
        for task in tasks:
            task.cancel()

    def results(self) -> Iterator[Answer | TokenmillError]:
        """Every answer or error, in order."""
        while True:
            self._count_finished()
            self._start_requests()
            if not self._unread:
                return
            first = self._unread[0]
            if isinstance(first, TokenmillError):
                self._unread.popleft()
                yield first
            elif first.done:
                self._unread.popleft()
                yield _result(first)
            else:
                self._finished.get()
                self._in_flight -= 1

    def _count_finished(self) -> None:
        try:
            while True:
                self._finished.get_nowait()
                self._in_flight -= 1
        except Empty:
            pass

    def _start_requests(self) -> None:
        while (
            self._prompts is not None
            and self._in_flight < self._most_in_flight
            and len(self._unread) < self._most_unread
        ):
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self._prompts = None
                return
            try:
                task = self._submit(prompt)
            except RequestRefused as error:
                self._unread.append(error)
                continue
            self._unread.append(task)
            self._in_flight += 1
            task.when_done(lambda: self._finished.put(None))


def _result(task: BackgroundTask[Answer]) -> Answer | TokenmillError:
    try:
        return task.result()
    except TokenmillError as error:
        return error


async def _stream(engine: AsyncEngine, request: Request, emit: Emit[str]) -> Answer:
    stream = engine.stream(request)
    try:
        async for event in stream:
            if not isinstance(event, Piece):
                return event
            if event.text:
                emit(event.text)
    finally:
        await stream.aclose()
    raise AssertionError("a stream ended without an answer")


def _body(prompt: Prompt) -> Mapping[str, Any]:
    return prompt if isinstance(prompt, Mapping) else {"messages": _messages(prompt)}


def _messages(messages: str | Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestRefused(
            f"a prompt must be a text or a list of OpenAI messages, not {type(messages).__name__}",
            hint='for example "Say hello." or [{"role": "user", "content": "Say hello."}]',
        )
    return [dict(cast(Mapping[str, Any], message)) for message in messages]


@contextmanager
def _engine_folder(state: Path) -> Iterator[Path]:
    """A path that names the engine of one `load`: the first of `loaded/0`, `loaded/1`, ... that no other load uses.

    A lock reserves it, which the kernel releases when this process dies. Names are reused, so that the
    state folder does not fill with logs of old engines.
    """
    home = state / "loaded"
    private_folder(home)
    for number in count():
        lock = os.open(home / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            yield home / str(number)
        finally:
            os.close(lock)
        return
