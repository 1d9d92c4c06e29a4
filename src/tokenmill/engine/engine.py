"""What every engine is to its callers: requests in, pieces and an answer out, counters and capabilities to read.

One request is one sequence. A stream gives pieces of text and ends with exactly one `Answer`, or raises: `EngineDied`
(may be sent again), `EngineTimeout`, `RequestRefused` and `TooLong` (sending again cannot help). Leaving a stream early
cancels its sequence, and its lane and cells are free at the engine's next step.
What an engine cannot do, its capabilities say; nothing is emulated silently.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Priority = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "tool_calls"]
EngineKind = Literal["native", "llama-server", "ik_llama", "vllm", "url"]
State = Literal["starting", "loading", "warming", "ready", "restarting", "stopping", "stopped", "failed"]
MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be written out by the model's own template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = None  # as in OpenAI's API
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


Prompt = Chat | str | tuple[int, ...]
"""A conversation, text as it is, or tokens."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. None leaves a value to the engine: llama.cpp's own defaults, in the native engine too."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_last_n: int | None = None
    seed: int | None = None  # None: drawn anew for each request
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None  # None: no logprobs at all; 0: of the chosen token alone
    grammar: str | None = None  # GBNF
    json_schema: str | None = None  # as JSON text; "{}" for any JSON


@dataclass(frozen=True, slots=True)
class Request:
    """One piece of work."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: as far as the context goes
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # go on to max_tokens: for measuring
    priority: Priority = "batch"
    timeout_s: float | None = None  # from when the engine took it
    lane: int | None = None  # the slot to use, where lanes can be chosen
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys for a server's body, as they are


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its logarithmic probability before any sampler touched it."""

    text: str
    token: int | None
    logprob: float
    raw: bytes  # the token's bytes: part of a character, perhaps
    top: tuple["TokenLogprob", ...] = ()  # the likeliest, best first; their own `top` is empty


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that has come, never half a character and never part of a stop string."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # of the prompt, not computed again; None: the engine does not say


@dataclass(frozen=True, slots=True)
class Timings:
    """One request as the engine saw it; None: it does not say."""

    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queued_steps: int | None = None  # that ended between its coming and the first with a part of it


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a stream: all of it together."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprob, ...] | None = None
    message: Mapping[str, Any] | None = None  # the assistant's, where the engine parsed it: tool calls, reasoning
    lane: int | None = None
    notes: tuple[str, ...] = ()  # why the prompt was not reused as far as it could have been, and the like


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do."""

    shares_prefixes: bool  # sequences share the cells of one head
    keeps_prefixes: bool  # a head computed once is found again by a later request
    chooses_lanes: bool  # Request.lane is obeyed
    interactive_first: bool
    pins_heads: bool
    saves_heads: bool
    changes_threads: bool  # without reloading weights
    changes_context: bool
    reports_cached_tokens: bool
    grammar: bool
    json_schema: bool
    logit_bias: bool
    tools_parsed: bool  # tool calls come back parsed in Answer.message
    most_logprobs: int
    shows_tools: bool | None = None  # the model is told what tools a request has; None: the server knows
    notes: tuple[str, ...] = ()  # what it cannot, and why, for a person


@dataclass(frozen=True, slots=True)
class Identity:
    """What answers."""

    kind: EngineKind
    model: str  # the name in answers
    model_id: str  # answers of the same model have the same; part of a job's identity
    build: str  # engine and version, in its own words
    context: int | None  # tokens of one sequence at most
    lanes: int | None  # sequences at once
    address: str  # URL or socket
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has done since it started; None: it does not count that."""

    prompt_tokens_computed: int | None = None
    prompt_tokens_reused: int | None = None
    generated_tokens: int | None = None
    steps: int | None = None  # calls that computed a batch
    step_tokens: int | None = None  # tokens in all of them
    decode_s: float | None = None  # inside the engine's computation
    busy_s: float | None = None  # wall time with work to do
    cells_used: int | None = None
    cells_total: int | None = None
    running: int | None = None
    waiting: int | None = None
    evicted_tokens: int | None = None
    preemptions: int | None = None
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How an engine is now."""

    state: State
    identity: Identity
    counters: Counters
    detail: str | None = None  # what it is doing, or why it failed
    progress: float | None = None  # of a load, 0 to 1
    eta_s: float | None = None


class Engine(Protocol):
    """A running thing that answers."""

    @property
    def identity(self) -> Identity:
        """What answers."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request; the last value is the answer. Closing the generator cancels."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""

    async def status(self) -> Status:
        """State and counters, as of now."""

    async def close(self) -> None:
        """Stop what we started; let go of what we attached to."""


async def answer(engine: Engine, request: Request) -> Answer:
    """The whole answer at once."""
    stream = engine.stream(request)
    try:
        async for event in stream:
            if isinstance(event, Answer):
                return event
    finally:
        await stream.aclose()
    raise AssertionError("a stream ended without an answer")
