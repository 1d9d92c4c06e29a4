"""Values of tuning: trial settings, figures, trials, aims and operating points."""

from dataclasses import dataclass
from typing import Literal

from tokenmill.engine.engine import KvLayout

AimKind = Literal["throughput", "latency", "cores", "context", "energy"]
TrialOutcome = Literal["measured", "out of memory", "died", "hung", "refused"]


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """Complete settings of one trial. Fields after `flash_attention` require a reload of the weights."""

    threads: int  # for decoding
    threads_batch: int  # for prefill
    sequences: int  # slots for batch jobs
    ubatch: int
    context: int  # tokens per sequence
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    mmap: bool = True
    repack: bool = True
    offload_min_batch: int | None = None  # threshold in force at load; None: nothing moves, or unknown
    placement: str = "plan"  # fingerprint of the placement; "plan": CPU only, or unknown


@dataclass(frozen=True, slots=True)
class Aim:
    """What the user wants to optimize."""

    kind: AimKind = "throughput"
    first_token_s: float | None = None  # latency: maximum time to first token of an interactive request during a batch
    within: float = 0.10  # cores: share of the best throughput that may be lost
    least_context: int | None = None  # minimum tokens per sequence, for every aim
    least_sequences: int = 1
    prompt_tokens: int = 512  # measured work: tokens of the shared prefix ...
    tail_tokens: int = 64  # ... of each job's own tail ...
    output_tokens: int = 64  # ... and of the output


@dataclass(frozen=True, slots=True)
class Figures:
    """Measured figures of an engine at some settings; None: not measured."""

    decode_tok_s: float | None = None  # total of all slots
    prefill_tok_s: float | None = None
    jobs_tok_s: float | None = None  # output tok/s with prompt time included: the throughput of a batch
    first_token_s: float | None = None  # of an interactive request during a full batch
    joules_per_token: float | None = None
    host_bytes: int | None = None  # resident host memory
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of some settings, successful or not."""

    dials: TrialSettings
    outcome: TrialOutcome
    figures: Figures = Figures()
    seconds: float = 0.0  # duration, loads included
    loaded: bool = False  # whether it loaded the weights
    disturbed: str | None = None  # other load during the trial, which makes the figures invalid
    detail: str | None = None  # the engine's error, unless the outcome is `measured`
    when: str | None = None  # ISO 8601, UTC

    @property
    def counts(self) -> bool:
        """Whether the figures are valid."""
        return self.outcome == "measured" and self.disturbed is None


@dataclass(frozen=True, slots=True)
class PointScope:
    """Scope of a measurement: it applies only to the same machine, model and engine build."""

    machine: str
    machine_id: str
    model: str
    model_id: str
    engine: str  # native, llama-server, ...
    build: str  # build of the engine


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The best settings found, and their cost."""

    place: PointScope
    aim: Aim
    dials: TrialSettings
    figures: Figures
    noise: float  # relative spread of repeats: smaller differences are not significant
    given_up: tuple[str, ...]  # sentences on alternatives that are better in other figures
    knee: str  # a sentence on the bend of the throughput curve
    front: tuple[Trial, ...]  # Pareto-optimal trials
    trials: tuple[Trial, ...]
    loads: int
    seconds: float
    when: str  # ISO 8601, UTC
    under: tuple[str, ...] = ()  # options that the point depends on, such as --cpu-only
    context_given: bool = False  # the user chose the context for this tuning, not for commands without --context


@dataclass(frozen=True, slots=True)
class SlotTrial:
    """Figures of a running engine with a number of slots."""

    slots: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class SlotPoint:
    """Slots and KV layout of a running engine, with reasons. Applies to that engine only and is never stored."""

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
