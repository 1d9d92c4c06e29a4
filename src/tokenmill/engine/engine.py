"""The interface of all engines, local or remote: requests, status, and optional operations.

One request is one sequence. A stream yields pieces of text and ends with exactly one `Answer`, or raises: `EngineDied`
and `EngineTimeout` (a retry may succeed), `RequestRefused` and `TooLong` (a retry cannot succeed). Closing a stream
cancels its sequence and frees its slot and KV cells at the engine's next step.

Optional operations are declared in `Capabilities`: callers check `engine.capabilities` and call the method. Engines
never emulate an operation that they lack, and callers never check the class of an engine.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError, TokenmillError

Priority = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "tool_calls"]
EngineKind = Literal["native", "llama-server", "ik_llama", "vllm", "url"]
EngineState = Literal[
    "starting", "loading", "warming", "ready", "unresponsive", "restarting", "stopping", "stopped", "failed"
]
Liveness = Literal["up", "unresponsive", "restarting", "unreachable", "failed"]
"""unresponsive: the process runs, but a step takes far longer than predicted, or it sends no heartbeats."""
KvLayout = Literal["unified", "per_slot"]
SlotLimit = Literal["slots", "jobs", "cells", "prefix", "prompts"]
"""What keeps more batch requests from running.

slots: all are busy. jobs: no request waits. cells: KV cells. prefix: a prefix that is being computed.
prompts: several prompts are admitted together, because computing them one by one takes more passes.
"""
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, formatted with the model's chat template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = None  # as in OpenAI's API
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


Prompt = Chat | str | tuple[int, ...]
"""A conversation, plain text (no chat template is applied), or token ids."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. None: the engine's default, which is llama.cpp's in the native engine."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_last_n: int | None = None
    seed: int | None = None  # None: random for each request
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None  # None: no logprobs; 0: only of the sampled token
    grammar: str | None = None  # GBNF
    json_schema: str | None = None  # JSON text; "{}" accepts any JSON


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: until the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # generate max_tokens tokens, for measurements
    priority: Priority = "batch"
    timeout_s: float | None = None  # from when the engine receives the request
    slot: int | None = None  # the slot to use, for engines with `chooses_slots`; None: any
    extra: Mapping[str, Any] = field(default_factory=dict)  # additional keys of an HTTP request body
    later: tuple[Prompt, ...] = ()  # prompts of later requests, for engines with `needs_branches`
    label: str | None = None  # shown with its slot, such as the custom_id of a job; not sent to servers


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log probability, before sampling parameters are applied."""

    text: str
    token: int | None
    logprob: float
    raw: bytes  # may be an incomplete UTF-8 character
    top: tuple["TokenLogprob", ...] = ()  # the most likely tokens, best first; their `top` is empty


@dataclass(frozen=True, slots=True)
class Piece:
    """Generated text; contains whole characters and no part of a stop string."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""  # text of the model's reasoning, if the engine separates it


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # prompt tokens from the prefix cache; None: not reported

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request as measured by the engine; None: not reported."""

    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queued_steps: int | None = None  # engine steps between its arrival and its first token


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `str()` gives its text."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprob, ...] | None = None
    message: Mapping[str, Any] | None = None  # from engines that parse tool calls and reasoning
    slot: int | None = None
    notes: tuple[str, ...] = ()  # for the user, such as why the cache was not used

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """The tool calls, as in OpenAI's API."""
        return tuple((self.message or {}).get("tool_calls") or ())

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine. The `json` metadata are keys of the JSON output where they differ from the attribute."""

    shares_prefixes: bool  # sequences share the KV cells of a common prefix
    keeps_prefixes: bool  # later requests can reuse a computed prefix
    chooses_slots: bool = field(metadata={"json": "chooses_lanes"})  # Request.slot selects the slot
    interactive_first: bool  # interactive requests are scheduled before batch requests
    pins_prefixes: bool = field(metadata={"json": "pins_heads"})  # pin_prefix() and unpin_prefix()
    saves_prefixes: bool = field(metadata={"json": "saves_heads"})  # save_prefix() and restore_prefix()
    changes_threads: bool  # set_threads(), without reloading weights
    changes_context: bool  # set_context()
    reports_cached_tokens: bool
    grammar: bool
    json_schema: bool
    logit_bias: bool
    tools_parsed: bool  # Answer.message has parsed tool calls
    max_logprobs: int = field(metadata={"json": "most_logprobs"})
    shows_tools: bool | None = None  # the template shows the request's tools to the model; None: unknown
    notes: tuple[str, ...] = ()  # missing features and why, for the user
    max_slots: int | None = None  # set_slots() takes 1 to max_slots; None: the number of slots is fixed
    changes_kv_layout: bool = False
    saves_slots: bool = False  # save_slot() and restore_slot(), once verify_saved_slots() has succeeded
    copies_prefixes: bool = False  # slots have KV cells of their own and copy prefixes from each other
    needs_branches: bool = False  # a prefix is shared only if Request.later tells where its prompts diverge
    lists_contents: bool = False  # running_requests() and cached_prefixes()
    embeddings: bool = False  # embed(), which a server may still refuse
    images: bool = False  # messages may have images
    audio: bool = False
    restarts: bool = False  # restarted when its process dies


@dataclass(frozen=True, slots=True)
class Runtime:
    """Settings and memory that a running engine reports."""

    threads: int
    threads_batch: int
    kv_layout: KvLayout = "unified"
    buffers: tuple[Buffer, ...] | None = None  # allocated by llama.cpp


@dataclass(frozen=True, slots=True)
class Identity:
    """Name, model and build of an engine."""

    kind: EngineKind
    model: str  # model name in answers
    model_id: str  # the same for the same weights; part of a job's identity
    build: str  # engine and version, as it reports them
    context: int | None  # maximum tokens of one sequence
    slots: int | None = field(metadata={"json": "lanes"})
    address: str  # URL or socket
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters since an engine's start, and gauges; None: not reported."""

    prompt_tokens_computed: int | None = None
    prompt_tokens_reused: int | None = None
    generated_tokens: int | None = None
    steps: int | None = None  # forward passes
    step_tokens: int | None = None  # tokens of all forward passes
    decode_s: float | None = None  # time in forward passes
    busy_s: float | None = None  # wall time with requests in flight
    cells_used: int | None = None
    cells_total: int | None = None
    running: int | None = None
    waiting: int | None = None
    evicted_tokens: int | None = None
    preemptions: int | None = None
    slot_steps: int | None = None  # running batch requests, summed over forward passes
    limited_steps: Mapping[SlotLimit, int] | None = None  # forward passes by what kept more requests from running
    batch_step_s: float | None = None  # the last forward pass with batch requests; interactive ones may wait for it
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Current state of an engine."""

    state: EngineState
    identity: Identity
    counters: Counters
    detail: str | None = None  # what the engine is doing, or why it failed
    progress: float | None = None  # of loading, 0 to 1
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class HttpApi:
    """How to call the HTTP API of a running server."""

    kind: EngineKind
    model: str
    slots: int | None = None
    priorities: bool = False  # vLLM with --scheduling-policy priority
    guided: bool = False  # vLLM before 0.11: guided_grammar instead of structured_outputs
    tools: bool = True  # the server passes tools to the model and parses its calls
    images: bool = True
    audio: bool = True
    remote_media: bool = False  # the server may fetch images by URL


class Engine(ABC):
    """A running engine. Must be used in the event loop in which it was created.

    Subclasses implement the abstract methods and override the optional operations that they support. An unsupported
    operation raises EngineError.
    """

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """The engine's identity; while it restarts, that of the last process."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The features of the engine."""

    @abstractmethod
    def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Generate; the last value is the `Answer`. Closing the generator cancels the request."""

    @abstractmethod
    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the chat template applied."""

    @abstractmethod
    async def status(self) -> EngineStatus:
        """Return the current state and counters."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine if this object started it; otherwise only disconnect."""

    async def stop(self) -> None:
        """Stop the engine's process, even if it is detached, and close."""
        await self.close()

    # ---- facts that need no request to the engine

    @property
    def runtime(self) -> Runtime | None:
        """Settings and memory of the engine; None if it does not report them."""
        return None

    @property
    def http_api(self) -> HttpApi | None:
        """How to call the HTTP API at `identity.address`; None if the engine has none or is not running."""
        return None

    # ---- life cycle

    @cached_property
    def ended(self) -> asyncio.Future[EngineError]:
        """Completes when the engine has failed permanently. Closing the engine does not complete it.

        Engines whose `liveness` is read from other threads must create it in their constructor.
        """
        return asyncio.get_running_loop().create_future()

    @property
    def exited(self) -> asyncio.Future[EngineError]:
        """Completes when the current process has died; the next process has a new future."""
        return self.ended

    @property
    def generation(self) -> int:
        """Number of processes that have died so far; it changes with every restart."""
        return 0

    @property
    def liveness(self) -> Liveness:
        """Whether the engine is usable, without a request to it."""
        return "failed" if self.ended.done() else "up"

    @property
    def last_error(self) -> TokenmillError | None:
        """The last failure: why the engine died or could not be reached; None if it never failed."""
        return self.ended.result() if self.ended.done() else None

    async def reconnect(self) -> bool:
        """Retry the connection to an engine whose liveness is "unreachable"; returns whether it is up."""
        return self.liveness == "up"

    # ---- optional operations: see Capabilities

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change the number of threads for decode and for prefill, effective from the next step."""
        raise self._unsupported("changing the number of threads")

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests, up to `capabilities.max_slots`."""
        raise self._unsupported("changing the number of slots")

    async def set_context(self, **changes: object) -> None:
        """Replace the context without reloading the weights; requests in flight are recomputed in the new one."""
        raise self._unsupported("changing the context")

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Share one KV cache between all slots ("unified"), or divide it between them ("per_slot").

        With "per_slot", prefixes are not cached and no slot is reserved for interactive requests.
        """
        raise self._unsupported("changing the KV layout")

    async def pin_prefix(self, prompt: Prompt) -> Usage:
        """Compute a prefix and keep it in the cache until `unpin_prefix`.

        A `Chat` is the prefix of all chats that begin with its messages. Returns the prefix's tokens and how many of
        them were already cached.
        """
        raise self._unsupported("pinning prefixes")

    async def unpin_prefix(self, prompt: Prompt) -> None:
        """Allow a pinned prefix to be evicted."""
        raise self._unsupported("pinning prefixes")

    async def save_prefix(self, prompt: Prompt, path: Path) -> int:
        """Save the KV state of a cached prefix to a file; returns its number of tokens."""
        raise self._unsupported("saving prefixes")

    async def restore_prefix(self, path: Path, *, pin: bool = True) -> int:
        """Load a saved prefix; returns its number of tokens.

        ForeignState if another model, build or cache type saved it.
        """
        raise self._unsupported("saving prefixes")

    async def verify_saved_slots(self, folder: Path) -> tuple[bool, str]:
        """Test whether the engine reuses a slot saved to and restored from `folder`; returns the result and details."""
        raise self._unsupported("saving slots")

    async def save_slot(self, slot: int, name: str) -> int:
        """Save the state of a slot to a file in the server's slot folder; returns its number of tokens."""
        raise self._unsupported("saving slots")

    async def restore_slot(self, slot: int, name: str) -> int:
        """Load the saved state of a slot; returns its number of tokens."""
        raise self._unsupported("saving slots")

    async def running_requests(self) -> list[dict[str, Any]]:
        """The sequences in flight, oldest first."""
        raise self._unsupported("listing requests")

    async def cached_prefixes(self) -> list[dict[str, Any]]:
        """The nodes of the prefix tree in the KV cache."""
        raise self._unsupported("listing cached prefixes")

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Forward a /v1/embeddings request; RequestRefused if the server does not support embeddings."""
        raise self._unsupported("embeddings")

    def _unsupported(self, what: str) -> EngineError:
        return EngineError(f"{self.identity.build} does not support {what}", hint="use another engine")


async def answer(engine: Engine, request: Request) -> Answer:
    """Run a request and return the complete answer."""
    stream = engine.stream(request)
    try:
        async for event in stream:
            if isinstance(event, Answer):
                return event
    finally:
        await stream.aclose()
    raise AssertionError("a stream ended without an answer")
