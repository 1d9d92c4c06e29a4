"""`Report`: everything that a page shows, before it is rendered. Knows no files, HTML or Markdown.

Every figure carries an `Origin`: measured (where, with which build, when) or predicted. A missing figure is a `Gap`
with the command that would measure it.
"""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Change, Decision, Settings, Shortfall
from tokenmill.tuner.point import OperatingPoint

OriginKind = Literal["measured", "predicted"]
Unit = Literal["tok/s", "bytes", "s"]


@dataclass(frozen=True, slots=True)
class FigureOrigin:
    """How a figure came about; None: not known."""

    kind: OriginKind
    machine: str | None = None
    build: str | None = None
    when: str | None = None  # ISO 8601
    note: str | None = None

    @property
    def words(self) -> str:
        """`measured on vm, llama.cpp b1, 2026-11-15`: for a caption."""
        where = f" on {self.machine}" if self.machine else ""
        parts = [f"{self.kind}{where}", self.build, self.when[:10] if self.when else None, self.note]
        return ", ".join(part for part in parts if part)


PREDICTED = FigureOrigin("predicted", note="by the plan")


@dataclass(frozen=True, slots=True)
class Dot:
    """One place on a curve; repeated measurements are one dot with its spread."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Series:
    """Dots that belong together, by x."""

    name: str
    origin: FigureOrigin
    dots: tuple[Dot, ...]

    def at(self, x: float | None) -> Dot | None:
        """The dot at an x."""
        return next((dot for dot in self.dots if dot.x == x), None)


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """A trial that gave no figure, and why."""

    x: float
    why: str


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """One chart: what came out over one setting."""

    key: str  # threads, prefill-threads, sequences, decode-depth, ...
    title: str
    x_name: str
    unit: str
    lines: tuple[Series, ...]
    doubling: bool = False  # x is read in doublings: 1, 2, 4, ...
    knee: float | None = None  # x
    chosen: float | None = None  # x of the operating point
    lost: tuple[FailedTrial, ...] = ()
    note: str | None = None  # what was held still


@dataclass(frozen=True, slots=True)
class BarSegment:
    """Bytes of one item; `free` is what is left."""

    item: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """One memory after a real load, item by item, with what that load's own plan had said."""

    predicted: tuple[BarSegment, ...]
    measured: tuple[BarSegment, ...]
    origin: FigureOrigin
    settings: str  # in words


@dataclass(frozen=True, slots=True)
class TierPicture:
    """One memory: what the plan puts there at full context, and what the last load really took."""

    name: str
    kind: str
    capacity_bytes: int | None
    nominal_gb_s: float | None
    measured_gb_s: float | None
    planned: tuple[BarSegment, ...]  # without free
    free_bytes: int | None  # None: the capacity is not known
    loading_bytes: int  # the most that loading takes
    missing_bytes: int = 0
    loaded: Loaded | None = None

    @property
    def planned_bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.planned)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a reader wants to know of a model first."""

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
    layers_on: tuple[tuple[str, int], ...]  # device tier, how many layers it computes
    decode_tok_s: float | None  # one sequence, empty context
    prefill_tok_s: float | None
    confidence: str | None
    load_cold_s: float | None
    load_warm_s: float | None
    load_bound_by: str | None
    load_s: float | None  # measured
    loaded: FigureOrigin | None  # of that
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchReuse:
    """Computed and reused prompt tokens of one batch, as counted by the engine."""

    name: str
    source: str  # the file's name
    when: str  # ISO 8601
    jobs: int
    answers: int  # computed by the engine
    answers_reused: int  # taken from before, or from equal lines
    computed_tokens: int  # of prompts
    reused_tokens: int
    written_tokens: int

    @property
    def share(self) -> float | None:
        """Of the prompt tokens, those that were not computed again."""
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
    why: str | None = None  # of a difference, where it is known

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
    """How far the context could really be filled."""

    usable_context: int | None
    goal_context: int | None
    reason: str
    origin: FigureOrigin
    curves: tuple[ChartCurve, ...] = ()

    @property
    def usable(self) -> str:
        """The usable context in words."""
        of = f" of {self.goal_context:,}" if self.goal_context else ""
        return "unknown" if self.usable_context is None else f"{self.usable_context:,}{of} tokens"


@dataclass(frozen=True, slots=True)
class CommandText:
    """Something to run."""

    what: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """What is not known yet, and the command that would tell."""

    about: str  # a section: curves, depth, reuse, ...
    words: str
    command: str | None


@dataclass(frozen=True, slots=True)
class ReportPage:
    """Everything on the page."""

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
        """Model and machine."""
        return f"{self.model.name} on {self.machine.name}" if self.model else self.machine.name

    def gap(self, about: str) -> tuple[Gap, ...]:
        """What is missing in one section."""
        return tuple(gap for gap in self.gaps if gap.about == about)
