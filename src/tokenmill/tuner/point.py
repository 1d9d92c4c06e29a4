"""What can be turned, what was measured there, and the operating point that came out. Values only."""

from dataclasses import dataclass
from typing import Literal

from tokenmill.engine.engine import KvLayout

AimKind = Literal["throughput", "latency", "cores", "context", "energy"]
TrialOutcome = Literal["measured", "out of memory", "died", "hung", "refused"]


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """Settings of one trial, complete. Those after `flash_attention` need the weights to be loaded anew."""

    threads: int  # for decoding
    threads_batch: int  # for prefill
    sequences: int  # batch lanes at once
    ubatch: int
    context: int  # tokens of one sequence
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    mmap: bool = True
    repack: bool = True
    offload_min_batch: int | None = None  # rows in force when it was loaded; None: nothing moves, or it is unknown
    placement: str = "plan"  # plan.fingerprint of where weights are; "plan": on processors alone, or unknown


@dataclass(frozen=True, slots=True)
class Aim:
    """What is best, in a user's words."""

    kind: AimKind = "throughput"
    first_token_s: float | None = None  # latency: the most an interactive request may wait while a batch runs
    within: float = 0.10  # cores: the share of the best throughput that may be given up
    least_context: int | None = None  # tokens that one sequence must have, whatever the aim
    least_sequences: int = 1
    prompt_tokens: int = 512  # the work that is measured: a shared head ...
    tail_tokens: int = 64  # ... what differs between jobs ...
    output_tokens: int = 64  # ... and what is written


@dataclass(frozen=True, slots=True)
class Figures:
    """What an engine did at some dials; None: not measured there."""

    decode_tok_s: float | None = None  # all lanes together
    prefill_tok_s: float | None = None
    jobs_tok_s: float | None = None  # tokens written a second with the prompts' time counted: what a batch gets
    first_token_s: float | None = None  # of an interactive request beside a full batch
    joules_per_token: float | None = None
    host_bytes: int | None = None  # resident
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """Dials that were tried: a crash is a result too."""

    dials: TrialSettings
    outcome: TrialOutcome
    figures: Figures = Figures()
    seconds: float = 0.0  # that it took, a load included
    loaded: bool = False  # whether the weights were loaded for it
    disturbed: str | None = None  # what else used the machine: the figures do not count
    detail: str | None = None  # of an outcome that is not `measured`: the engine's last words
    when: str | None = None  # ISO 8601, UTC

    @property
    def counts(self) -> bool:
        """Whether the figures can be compared with others'."""
        return self.outcome == "measured" and self.disturbed is None


@dataclass(frozen=True, slots=True)
class PointScope:
    """Where a measurement holds: any of these changes, and it does not."""

    machine: str
    machine_id: str
    model: str
    model_id: str
    engine: str  # native, llama-server, ...
    build: str  # of the engine


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The best dials that were found, and what they cost."""

    place: PointScope
    aim: Aim
    dials: TrialSettings
    figures: Figures
    noise: float  # relative spread of repeated measurements: smaller differences mean nothing
    given_up: tuple[str, ...]  # in sentences: what would have been better otherwise, and by how much
    knee: str  # the bend of the curve in one sentence
    front: tuple[Trial, ...]  # trials that nothing else beats in everything (Pareto)
    trials: tuple[Trial, ...]
    loads: int
    seconds: float
    when: str  # ISO 8601, UTC
    under: tuple[str, ...] = ()  # options that make another machine of this one, such as --cpu-only


@dataclass(frozen=True, slots=True)
class SlotTrial:
    """Figures of a running engine with a number of slots."""

    slots: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class SlotPoint:
    """Slots and KV layout in force on a running engine, and why. It holds for that engine only and is never stored."""

    slots: int | None  # None: the engine does not report them
    kv_layout: KvLayout | None  # None: the engine does not report it
    trials: tuple[SlotTrial, ...] = ()  # by ascending slots
    slots_reason: str | None = None  # None: the slots were not measured
    layout_reason: str | None = None  # None: the layout was not changed

    @property
    def measured(self) -> bool:
        """Whether the number of slots comes from a measurement; a measurement without any result counts too."""
        return self.slots_reason is not None

    @property
    def decode_tok_s(self) -> tuple[tuple[int, float], ...]:
        """Pairs of slots and measured tokens per second of all slots together, by ascending slots."""
        rates = ((trial.slots, trial.figures.decode_tok_s) for trial in self.trials)
        return tuple((slots, rate) for slots, rate in rates if rate is not None)
