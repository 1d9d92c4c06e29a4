"""Jobs in the engine: one task each, which streams the answer and tells the loop what comes."""

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
    sent: Dispatch | None  # None: a suspect, sent past the scheduler
    generation: int  # of the engine, when it was sent
    evicted_tokens: int | None = None  # by the engine, before this was sent
    since: RateMark = (0.0, 0.0)  # when it began, as the pace counts
    tokens: int = 0  # that have come
    task: "asyncio.Task[None] | None" = None

    @property
    def id(self) -> int:
        """The job's."""
        return self.job.id

    @property
    def trial(self) -> bool:
        """Whether it is a suspect's."""
        return self.sent is None


@dataclass(frozen=True, slots=True)
class Came:
    """The first tokens of an answer have come, or more of a suspect's."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream is over."""

    attempt: Attempt
    how: Answer | TokenmillError


@dataclass(frozen=True, slots=True)
class Broke:
    """Something that is nobody's fault but ours."""

    error: BaseException


OnAttemptEvent = Callable[[Came | StreamEnded | Broke], None]


def launch(
    attempt: Attempt, engine: Engine, *, timeout_s: float | None, tell: OnAttemptEvent, received: Callable[[int], None]
) -> None:
    """Send a job to the engine; `timeout_s` for one that has no time limit of its own. `received` counts tokens."""
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
                    if attempt.tokens == 0 or attempt.trial:  # the loop is not woken for every token
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
    """The job's tools on this engine; RequestRefused where they would have no effect."""
    use = tool_calls.adapt(request, engine.capabilities)
    if use.hidden and not use.forced:
        # A chat response has a header that says so; an output line has not.
        raise RequestRefused(
            "tools: the chat template of this model has no place for tools, so the model would not see them",
            hint='leave tools out, force a call with tool_choice "required", or use a model that knows tools',
        )
    return use


async def cancel(running: list[Attempt]) -> None:
    """Break attempts off; their lanes and cells are free at the engine's next step."""
    tasks = [attempt.task for attempt in running if attempt.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
