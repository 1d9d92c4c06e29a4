"""Values parsed from an engine's log. None: not in the log."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tokenmill.engine.fit_params import Buffer

Phase = Literal["starting", "reading", "context", "compiling", "warming", "ready"]
"""Phase of a load. reading: the weights; context: allocating caches and buffers; warming: the warm-up run."""

FaultKind = Literal[
    "memory",
    "vram",
    "mlock",
    "mmap",
    "argument",
    "architecture",
    "missing",
    "damaged",
    "port",
    "cuda",
    "assertion",
    "context",
    "crash",
    "load",
]


@dataclass(frozen=True, slots=True)
class Hint:
    """Load progress according to the log."""

    phase: Phase
    share: float | None = None  # completed share of this phase, 0 to 1
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class LogFault:
    """An error in the log."""

    kind: FaultKind
    message: str
    line: str  # the log line
    hint: str | None = None
    fatal: bool = True  # the engine exits because of it
    device: int | None = None  # the engine's index of the GPU
    needed_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Timings of one request. Engines differ in whether the first token counts as prefill."""

    prompt_tokens: int  # computed, without cached tokens
    prompt_s: float
    prompt_tok_s: float | None
    generated_tokens: int
    decode_s: float
    decode_tok_s: float | None
    cached_tokens: int | None = None
    slot: int | None = None
    task: int | None = None


@dataclass(frozen=True, slots=True)
class RequestedContext:
    """The context settings that the engine logged."""

    tokens: int | None = None  # total of all sequences
    sequences: int | None = None
    ubatch: int | None = None
    outputs: int | None = None  # tokens of a batch whose logits are kept
    unified: bool | None = None  # one KV cache for all sequences


@dataclass(frozen=True, slots=True)
class EngineLog:
    """Everything parsed from the log of one run."""

    build: str | None = None
    buffers: tuple[Buffer, ...] = ()
    output_bytes: int | None = None  # logits, in host memory
    prompt_cache_bytes: int | None = None  # used size of the host prompt cache
    kv_tokens: int | None = None  # capacity, total of all sequences
    requested: RequestedContext = RequestedContext()
    hint: Hint | None = None  # the latest
    faults: tuple[LogFault, ...] = ()
    timings: tuple[Timing, ...] = ()
    mapped: bool | None = None  # the model file is memory-mapped

    @property
    def cause(self) -> LogFault | None:
        """The first fatal error, which is why the engine exited."""
        return next((fault for fault in self.faults if fault.fatal), None)


def latest(hints: Iterable[Hint | None]) -> Hint | None:
    """The latest hint, up to the first `ready`."""
    last: Hint | None = None
    for hint in hints:
        last = hint or last
        if last is not None and last.phase == "ready":
            break
    return last
