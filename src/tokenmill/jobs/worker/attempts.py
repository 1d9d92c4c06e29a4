"""Attempts at jobs. Each runs in a task of its own that streams the answer and reports events to the worker loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Answer, Engine, Piece, Prompt, Request, Usage
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.errors import EngineTimeout, RequestRefused, TokenmillError
from tokenmill.jobs.models import Job
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.worker.throughput import RateMark


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a job."""

    job: Job
    call: Call
    prompt_bytes: int
    began_s: float
    sent: Dispatch | None  # None: a suspect, which bypasses the scheduler
    generation: int  # of the engine process, when the attempt was sent
    evicted_tokens: int | None = None  # the engine's counter, when the attempt was sent
    since: RateMark = (0.0, 0.0)  # throughput counters when it began
    later: tuple[Prompt, ...] = ()  # prompts of `Dispatch.later`
    tokens: int = 0  # received so far
    task: "asyncio.Task[None] | None" = None

    @property
    def id(self) -> int:
        """The job's ID."""
        return self.job.id

    @property
    def trial(self) -> bool:
        """Whether the job is a suspect on trial."""
        return self.sent is None


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """The first tokens of an answer arrived; for a suspect, any tokens."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """An attempt ended, with an answer or an error."""

    attempt: Attempt
    result: Answer | TokenmillError


@dataclass(frozen=True, slots=True)
class InternalError:
    """An unexpected exception, which ends the run."""

    error: BaseException


OnAttemptEvent = Callable[[TokensReceived | StreamEnded | InternalError], None]


def launch(
    attempt: Attempt,
    engine: Engine,
    *,
    timeout_s: float | None,
    on_event: OnAttemptEvent,
    on_tokens: Callable[[int], None],
) -> None:
    """Start an attempt; its events go to `on_event`, token counts to `on_tokens`.

    `timeout_s` applies to jobs without a timeout of their own.
    """
    request = attempt.call.request("batch")
    slot = attempt.sent.slot if attempt.sent is not None else None
    request = replace(
        request,
        slot=slot,
        timeout_s=timeout_s if request.timeout_s is None else request.timeout_s,
        label=attempt.job.custom_id,
        later=tuple(_as_sent(attempt.later, engine)),
    )

    async def stream() -> None:
        try:
            use = _tool_use(request, engine)
            async with aclosing(events_of(attempt.call, use.request, engine)) as events:
                async for event in events:
                    if isinstance(event, Answer):
                        on_event(StreamEnded(attempt, use.parse(event)))
                        return
                    on_tokens(event.tokens)
                    if attempt.tokens == 0 or attempt.trial:  # otherwise every token would wake the loop
                        on_event(TokensReceived(attempt))
                    attempt.tokens += event.tokens
        except TokenmillError as error:
            on_event(StreamEnded(attempt, error))
            return
        raise AssertionError("a stream ended without an answer")

    def done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_event(InternalError(error))

    attempt.task = asyncio.create_task(stream())
    attempt.task.add_done_callback(done)


def events_of(call: Call, request: Request, engine: Engine) -> AsyncGenerator[Piece | Answer, None]:
    """The events of a job."""
    if call.endpoint == "embeddings":
        return _embedded(call.values["embedding"], request.timeout_s, engine)
    return engine.stream(request)


async def _embedded(
    body: Mapping[str, Any], timeout_s: float | None, engine: Engine
) -> AsyncGenerator[Piece | Answer, None]:
    """The embeddings of a job as an answer without text, whose message is the engine's response."""
    if not engine.capabilities.embeddings:
        raise RequestRefused(
            "this engine computes no embeddings", code="embeddings_not_supported", hint="use a server that does"
        )
    try:
        async with asyncio.timeout(timeout_s):
            response = await engine.embed(body)
    except TimeoutError:
        raise EngineTimeout(f"no embeddings within {timeout_s:g} s") from None
    tokens = int((response.get("usage") or {}).get("prompt_tokens") or 0)
    yield Answer("", "stop", Usage(tokens, 0, None), message=response)


def _tool_use(request: Request, engine: Engine) -> ToolUse:
    """Adapt the job's tools to this engine; raises RequestRefused if the model would not see them."""
    use = tool_calls.adapt(request, engine.capabilities)
    if use.hidden and not use.forced:
        # An HTTP response reports this in a header; an output line cannot.
        raise RequestRefused(
            "tools: the chat template of this model does not support tools, so the model would not see them",
            hint='remove tools, force a call with tool_choice "required", or use a model that supports tools',
        )
    return use


def _as_sent(prompts: Iterable[Prompt], engine: Engine) -> Iterator[Prompt]:
    """Prompts with tools adapted to this engine, as their own attempts will send them."""
    for prompt in prompts:
        with suppress(RequestRefused):
            yield tool_calls.adapt(Request(prompt), engine.capabilities).request.prompt


async def cancel(running: list[Attempt]) -> None:
    """Cancel attempts and wait until they have ended; the engine frees their slots and KV cells in its next step."""
    tasks = [attempt.task for attempt in running if attempt.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
