"""Attempts at jobs: one task each, which streams the answer from the engine and reports events to the worker loop."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Answer, Engine, Request
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.errors import RequestRefused, TokenmillError
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
    generation: int  # the engine's, when the attempt was sent
    evicted_tokens: int | None = None  # evicted by the engine before the attempt was sent
    since: RateMark = (0.0, 0.0)  # throughput counters when it began
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
class Came:
    """The first tokens of an answer arrived, or more tokens of a suspect's answer."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """An attempt ended, with an answer or an error."""

    attempt: Attempt
    how: Answer | TokenmillError


@dataclass(frozen=True, slots=True)
class Broke:
    """An internal error that no job or engine caused."""

    error: BaseException


OnAttemptEvent = Callable[[Came | StreamEnded | Broke], None]


def launch(
    attempt: Attempt, engine: Engine, *, timeout_s: float | None, tell: OnAttemptEvent, received: Callable[[int], None]
) -> None:
    """Send a job to the engine and report its events to `tell`; `received` counts tokens. `timeout_s` is a default."""
    request = attempt.call.request("batch")
    lane = attempt.sent.lane if attempt.sent is not None else None
    request = replace(request, lane=lane, timeout_s=timeout_s if request.timeout_s is None else request.timeout_s)

    async def stream() -> None:
        try:
            use = _tool_use(request, engine)
            async with aclosing(engine.stream(use.request)) as events:
                async for event in events:
                    if isinstance(event, Answer):
                        tell(StreamEnded(attempt, use.parse(event)))
                        return
                    received(event.tokens)
                    if attempt.tokens == 0 or attempt.trial:  # do not wake the loop for every token
                        tell(Came(attempt))
                    attempt.tokens += event.tokens
        except TokenmillError as error:
            tell(StreamEnded(attempt, error))
            return
        raise AssertionError("a stream ended without an answer")

    def done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            tell(Broke(error))

    attempt.task = asyncio.create_task(stream())
    attempt.task.add_done_callback(done)


def _tool_use(request: Request, engine: Engine) -> ToolUse:
    """Adapt the job's tools to this engine; raises RequestRefused if they would have no effect."""
    use = tool_calls.adapt(request, engine.capabilities)
    if use.hidden and not use.forced:
        # A chat response has a header for this; an output line has none.
        raise RequestRefused(
            "tools: the chat template of this model has no place for tools, so the model would not see them",
            hint='leave tools out, force a call with tool_choice "required", or use a model that knows tools',
        )
    return use


async def cancel(running: list[Attempt]) -> None:
    """Cancel attempts and wait for them; the engine frees their slots and cells in its next step."""
    tasks = [attempt.task for attempt in running if attempt.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
