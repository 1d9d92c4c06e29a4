"""Facts parsed from an engine's log. Sizes are as exact as the text; None: not in the log."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tokenmill.engine.fit_params import Buffer

Phase = Literal["starting", "reading", "context", "compiling", "warming", "ready"]
"""Phase of a load: reading weights, making caches and buffers, compiling kernels, a first run."""

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
    """Load progress in the engine's own terms."""

    phase: Phase
    share: float | None = None  # of this phase, 0 to 1
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class LogFault:
    """An error in the log, in words."""

    kind: FaultKind
    message: str
    line: str  # as the engine wrote it
    hint: str | None = None
    fatal: bool = True  # the engine exits after it
    device: int | None = None  # the GPU, as the engine counts them
    needed_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered request; rates are the engine's own, which counts the first token with the prompt or does not."""

    prompt_tokens: int  # computed, not those found in the cache
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

    tokens: int | None = None  # of all sequences together
    sequences: int | None = None
    ubatch: int | None = None
    outputs: int | None = None  # tokens of a batch whose logits are kept
    unified: bool | None = None  # one cache for all sequences


@dataclass(frozen=True, slots=True)
class EngineLog:
    """Everything parsed from the log of one run."""

    build: str | None = None
    buffers: tuple[Buffer, ...] = ()
    output_bytes: int | None = None  # logits, in host memory
    prompt_cache_bytes: int | None = None  # of the host's prompt cache, what is filled
    kv_tokens: int | None = None  # that all sequences together can have
    asked: RequestedContext = RequestedContext()
    hint: Hint | None = None  # the last
    faults: tuple[LogFault, ...] = ()
    timings: tuple[Timing, ...] = ()
    mapped: bool | None = None  # the model file is used where it lies

    @property
    def cause(self) -> LogFault | None:
        """The first fatal error, which is why the engine exited."""
        return next((fault for fault in self.faults if fault.fatal), None)


def latest(hints: Iterable[Hint | None]) -> Hint | None:
    """The latest progress of the load; later requests do not reset `ready`."""
    last: Hint | None = None
    for hint in hints:
        last = hint or last
        if last is not None and last.phase == "ready":
            break
    return last
