"""`ReportPage`: the contents of a report, before it is rendered; `tokenmill report --json` prints it.

Every figure has a `FigureOrigin`: measured (where, with which build, when) or predicted. A missing figure is a `Gap`
with the command that measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Change, Decision, JobTime, Settings, Shortfall
from tokenmill.tuner.point import OperatingPoint

OriginKind = Literal["measured", "predicted"]
Unit = Literal["tok/s", "bytes", "s"]


@dataclass(frozen=True, slots=True)
class FigureOrigin:
    """Whether a figure was measured or predicted, where and when; None: unknown."""

    kind: OriginKind
    machine: str | None = None
    build: str | None = None
    when: str | None = None  # ISO 8601
    note: str | None = None

    @property
    def words(self) -> str:
        """A caption such as `measured on vm, llama.cpp b1, 2026-11-15`."""
        where = f" on {self.machine}" if self.machine else ""
        parts = [f"{self.kind}{where}", self.build, self.when[:10] if self.when else None, self.note]
        return ", ".join(part for part in parts if part)


PREDICTED = FigureOrigin("predicted", note="by the plan")


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a line; repeated measurements are one dot with a range."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart: its dots by x."""

    name: str
    origin: FigureOrigin
    dots: tuple[Dot, ...]

    def at(self, x: float | None) -> Dot | None:
        """The dot at `x`, if there is one."""
        return next((dot for dot in self.dots if dot.x == x), None)


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """A trial without a result, and the reason."""

    x: float
    why: str


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """A chart: figures over one setting."""

    key: str  # threads, prefill-threads, sequences, decode-depth, ...
    title: str
    x_name: str
    unit: str
    lines: tuple[Series, ...]
    doubling: bool = False  # logarithmic x axis: 1, 2, 4, ...
    knee: float | None = None  # x
    chosen: float | None = None  # x of the operating point
    lost: tuple[FailedTrial, ...] = ()
    note: str | None = None  # the fixed settings


@dataclass(frozen=True, slots=True)
class BarSegment:
    """The bytes of one item; `free` is the unused rest."""

    item: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The contents of one memory after a load, with the prediction for that load."""

    predicted: tuple[BarSegment, ...]
    measured: tuple[BarSegment, ...]
    origin: FigureOrigin
    settings: str  # in words


@dataclass(frozen=True, slots=True)
class TierPicture:
    """One memory: its planned contents at full context, and those of the last load."""

    name: str
    kind: str
    capacity_bytes: int | None
    nominal_gb_s: float | None
    measured_gb_s: float | None
    planned: tuple[BarSegment, ...]  # without free
    free_bytes: int | None  # None: unknown capacity
    loading_bytes: int  # peak while loading
    missing_bytes: int = 0
    loaded: Loaded | None = None

    @property
    def planned_bytes(self) -> int:
        """The sum of all planned items."""
        return sum(part.bytes for part in self.planned)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The size and architecture of a model."""

    name: str
    architecture: str
    quantisation: str | None
    bytes: int
    parameters: int
    active_parameters: int
    layers: int
    experts: int | None
    experts_used: int | None
    training_context: int | None
    ghost: bool


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """A plan without its tensors."""

    fits: bool
    settings: Settings
    layers_on: tuple[tuple[str, int], ...]  # device and its number of layers
    decode_tok_s: float | None  # one sequence, empty context
    prefill_tok_s: float | None
    confidence: str | None
    load_cold_s: float | None
    load_warm_s: float | None
    load_bound_by: str | None
    load_s: float | None  # measured
    loaded: FigureOrigin | None  # of load_s
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    jobs: tuple[JobTime, ...] = ()
    longest_context: int | None = None  # that fits, if the plan does not


@dataclass(frozen=True, slots=True)
class BatchReuse:
    """Computed and reused prompt tokens of one batch, as counted by the engine, and its answers by finish reason."""

    name: str
    source: str  # the file's name
    when: str  # ISO 8601
    jobs: int
    answers: int  # computed by the engine
    answers_reused: int  # from earlier runs or equal lines
    computed_tokens: int  # of prompts
    reused_tokens: int
    written_tokens: int
    finish_reasons: Mapping[str, int] | None = None  # all answers by OpenAI finish reason; None: not counted

    @property
    def cut(self) -> int:
        """Answers that are incomplete; 0 if not counted."""
        return (self.finish_reasons or {}).get("length", 0)

    @property
    def share(self) -> float | None:
        """The share of prompt tokens that were reused."""
        total = self.computed_tokens + self.reused_tokens
        return self.reused_tokens / total if total else None


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure, predicted and measured."""

    what: str
    at: str  # settings in words
    unit: Unit
    predicted: float
    measured: float
    origin: FigureOrigin
    why: str | None = None  # known reason for the difference

    @property
    def error(self) -> float | None:
        """Relative prediction error: positive if the prediction was too high."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True, slots=True)
class QualityCheck:
    """One check of a qualification."""

    name: str
    score: float | None
    threshold: float | None
    good: bool | None  # None: only reported
    words: str | None


@dataclass(frozen=True, slots=True)
class Qualified:
    """Whether a quant is good enough to use."""

    checks: tuple[QualityCheck, ...]
    origin: FigureOrigin
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class Soaked:
    """The result of a soak: how far the context can be filled."""

    usable_context: int | None
    goal_context: int | None
    reason: str
    origin: FigureOrigin
    curves: tuple[ChartCurve, ...] = ()

    @property
    def usable(self) -> str:
        """The usable context as text."""
        of = f" of {self.goal_context:,}" if self.goal_context else ""
        return "unknown" if self.usable_context is None else f"{self.usable_context:,}{of} tokens"


@dataclass(frozen=True, slots=True)
class CommandText:
    """A command for the reader to run."""

    what: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """A figure that has not been measured, and the command that measures it."""

    about: str  # a section: curves, depth, reuse, ...
    words: str
    command: str | None


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The contents of a report."""

    made: str  # ISO 8601, UTC
    version: str
    machine: Machine
    model: ModelFacts | None = None
    plan: PlanFacts | None = None
    tiers: tuple[TierPicture, ...] = ()
    bandwidth: tuple[ChartCurve, ...] = ()
    curves: tuple[ChartCurve, ...] = ()  # by threads and by sequences
    depth: tuple[ChartCurve, ...] = ()  # by tokens in the context
    reuse: tuple[BatchReuse, ...] = ()
    comparisons: tuple[FigureComparison, ...] = ()
    point: OperatingPoint | None = None
    qualified: Qualified | None = None
    soaked: Soaked | None = None
    commands: tuple[CommandText, ...] = ()
    gaps: tuple[Gap, ...] = field(default_factory=tuple)

    @property
    def title(self) -> str:
        """The names of the model and the machine."""
        return f"{self.model.name} on {self.machine.name}" if self.model else self.machine.name

    def gap(self, about: str) -> tuple[Gap, ...]:
        """The gaps in one section."""
        return tuple(gap for gap in self.gaps if gap.about == about)
