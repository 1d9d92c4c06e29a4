"""The interface of all engines, local or remote: requests, status, and optional operations.

One request is one sequence. A stream yields pieces of text and ends with exactly one `Answer`, or raises: `EngineDied`
(may be sent again), `EngineTimeout`, `RequestRefused` and `TooLong` (sending again cannot help). Leaving a stream early
cancels its sequence; its slot and KV cells are free at the engine's next step.

Optional operations are declared in `Capabilities`: callers read `engine.capabilities` and call the method. Nothing is
emulated silently, and no caller needs to know the class of an engine.
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
EngineState = Literal["starting", "loading", "warming", "ready", "restarting", "stopping", "stopped", "failed"]
Liveness = Literal["up", "restarting", "unreachable", "failed"]
KvLayout = Literal["unified", "per_slot"]
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
    ignore_eos: bool = False  # generate max_tokens tokens, for measurements
    priority: Priority = "batch"
    timeout_s: float | None = None  # counted from the engine's receipt of the request
    lane: int | None = None  # the slot to use, for engines with `chooses_lanes`
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

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """One request as the engine saw it; None: it does not say."""

    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    queued_steps: int | None = None  # that ended between its coming and the first with a part of it


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `str()` gives its text."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprob, ...] | None = None
    message: Mapping[str, Any] | None = None  # the assistant's, where the engine parsed it: tool calls, reasoning
    lane: int | None = None
    notes: tuple[str, ...] = ()  # why the prompt was not reused as far as it could have been, and the like

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """The tool calls, as in OpenAI's API; empty if the answer has none."""
        return tuple((self.message or {}).get("tool_calls") or ())

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do."""

    shares_prefixes: bool  # sequences share the cells of a common prefix
    keeps_prefixes: bool  # a later request can reuse a prefix that was computed before
    chooses_lanes: bool  # Request.lane selects the slot
    interactive_first: bool
    pins_heads: bool  # pin_prefix() and unpin_prefix()
    saves_heads: bool  # save_prefix() and restore_prefix(); on a server, its slots
    changes_threads: bool  # set_threads(), without reloading weights
    changes_context: bool  # set_context()
    reports_cached_tokens: bool
    grammar: bool
    json_schema: bool
    logit_bias: bool
    tools_parsed: bool  # tool calls come back parsed in Answer.message
    most_logprobs: int
    shows_tools: bool | None = None  # the template shows the request's tools to the model; None: unknown
    notes: tuple[str, ...] = ()  # missing abilities and their reasons, for users
    max_slots: int | None = None  # set_slots() takes 1 to max_slots; None: the number of slots is fixed
    changes_kv_layout: bool = False
    saves_slots: bool = False  # save_slot() and restore_slot(), once verify_saved_slots() has succeeded
    lists_contents: bool = False  # running_requests() and cached_prefixes()
    embeddings: bool = False  # embed(); a server may still refuse
    restarts: bool = False  # a process that dies is replaced


@dataclass(frozen=True, slots=True)
class Runtime:
    """Settings and memory of a running engine, where it reports them."""

    threads: int
    threads_batch: int
    kv_layout: KvLayout = "unified"
    buffers: tuple[Buffer, ...] | None = None  # allocated by llama.cpp


@dataclass(frozen=True, slots=True)
class Identity:
    """What answers."""

    kind: EngineKind
    model: str  # the name in answers
    model_id: str  # answers of the same model have the same; part of a job's identity
    build: str  # engine and version, in its own words
    context: int | None  # maximum tokens of one sequence
    lanes: int | None  # number of slots
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
class EngineStatus:
    """How an engine is now."""

    state: EngineState
    identity: Identity
    counters: Counters
    detail: str | None = None  # what it is doing, or why it failed
    progress: float | None = None  # of a load, 0 to 1
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Speech:
    """How to call the HTTP API of one running server."""

    kind: EngineKind
    model: str
    lanes: int | None = None
    priorities: bool = False  # vLLM with --scheduling-policy priority
    guided: bool = False  # vLLM before 0.11: guided_grammar instead of structured_outputs
    tools: bool = True  # tools reach the model, and its calls come back parsed


class Engine(ABC):
    """A running engine. Belongs to the event loop in which it was made.

    Subclasses implement the abstract methods and override what else they support. An optional operation that an engine
    does not support raises EngineError.
    """

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """What answers, or answered last."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @abstractmethod
    def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request; the last value is the answer. Closing the generator cancels."""

    @abstractmethod
    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""

    @abstractmethod
    async def status(self) -> EngineStatus:
        """State and counters, as of now."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine if this object started it; else only disconnect."""

    async def stop(self) -> None:
        """Stop the engine's process, even one that was started to outlive us, and close."""
        await self.close()

    # ---- facts that are known without asking the engine

    @property
    def runtime(self) -> Runtime | None:
        """Its settings and memory; None if it does not report them."""
        return None

    @property
    def http_api(self) -> Speech | None:
        """How to call the HTTP API at `identity.address`; None if there is none, or it is not running now."""
        return None

    # ---- life cycle

    @cached_property
    def ended(self) -> asyncio.Future[EngineError]:
        """Done when the engine has failed and will not be restarted. Closing does not set it.

        Engines whose `liveness` is read from other threads create it in their constructor.
        """
        return asyncio.get_running_loop().create_future()

    @property
    def exited(self) -> asyncio.Future[EngineError]:
        """Done when the current process has died; a restarted engine has a new future."""
        return self.ended

    @property
    def generation(self) -> int:
        """The number of processes that have died so far: it differs before and after a restart."""
        return 0

    @property
    def liveness(self) -> Liveness:
        """Whether it can be used, as far as is known without asking."""
        return "failed" if self.ended.done() else "up"

    @property
    def last_error(self) -> TokenmillError | None:
        """Why it failed, died last, or could not be reached; None if none of that happened."""
        return self.ended.result() if self.ended.done() else None

    async def reconnect(self) -> bool:
        """Try again to reach an engine whose liveness is "unreachable"; returns whether it is up now."""
        return self.liveness == "up"

    # ---- optional operations: see Capabilities

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change the numbers of threads for decode and prefill, from the next step on."""
        raise self._unsupported("changing its threads")

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests, up to `capabilities.max_slots`."""
        raise self._unsupported("changing its slots")

    async def set_context(self, **changes: object) -> None:
        """Build another context on the loaded weights; requests in flight are computed again in the new one."""
        raise self._unsupported("changing its context")

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Share one KV cache between all slots, or give each slot its own cells; the number of slots stays.

        With "per_slot" no prefix is kept and no slot is reserved for interactive requests.
        """
        raise self._unsupported("changing its KV layout")

    async def pin_prefix(self, prompt: Prompt) -> Usage:
        """Compute a prefix once and keep it until `unpin_prefix`; a chat stands for all that begin with its messages.

        Returns the number of its tokens and how many of them were cached already.
        """
        raise self._unsupported("pinning prefixes")

    async def unpin_prefix(self, prompt: Prompt) -> None:
        """Allow a pinned prefix to be evicted."""
        raise self._unsupported("pinning prefixes")

    async def save_prefix(self, prompt: Prompt, path: Path) -> int:
        """Write the state of a computed prefix to a file; returns its tokens."""
        raise self._unsupported("saving prefixes")

    async def restore_prefix(self, path: Path, *, pin: bool = True) -> int:
        """Load a saved prefix; returns its tokens. ForeignState if it is of another model, build or cache type."""
        raise self._unsupported("saving prefixes")

    async def verify_saved_slots(self, folder: Path) -> tuple[bool, str]:
        """Test whether a slot that is saved to and restored from `folder` is reused, and say what was seen."""
        raise self._unsupported("saving slots")

    async def save_slot(self, slot: int, name: str) -> int:
        """Write the state of a slot to a file in the server's folder; returns its tokens."""
        raise self._unsupported("saving slots")

    async def restore_slot(self, slot: int, name: str) -> int:
        """Load the state of a slot; returns its tokens."""
        raise self._unsupported("saving slots")

    async def running_requests(self) -> list[dict[str, Any]]:
        """What each sequence in flight is doing, oldest first."""
        raise self._unsupported("listing its requests")

    async def cached_prefixes(self) -> list[dict[str, Any]]:
        """The prefix tree in the KV cache, node by node."""
        raise self._unsupported("listing its prefixes")

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a /v1/embeddings request; RequestRefused if the server has no embeddings."""
        raise self._unsupported("embeddings")

    def _unsupported(self, what: str) -> EngineError:
        return EngineError(f"{self.identity.build} does not support {what}", hint="use an engine whose capabilities do")


async def answer(engine: Engine, request: Request) -> Answer:
    """Return the complete answer of a request."""
    stream = engine.stream(request)
    try:
        async for event in stream:
            if isinstance(event, Answer):
                return event
    finally:
        await stream.aclose()
    raise AssertionError("a stream ended without an answer")
