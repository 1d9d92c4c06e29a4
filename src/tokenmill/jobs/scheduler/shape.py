"""What the order of jobs depends on in an engine: how many at once, how it reuses prompts, what it can hold."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.engine.engine import Capabilities, Identity
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.tuner.point import SlotPoint

Reuse = Literal["shares", "slots", "prefix cache", "none"]
"""How an engine reuses what it computed.

shares: sequences share cells, and one whose head another is computing waits for it inside the engine.
slots: each lane has what its last request left; the lane is chosen by who asks.
prefix cache: any request finds what was computed before it started; those that start together all compute.
none: every prompt is computed in full.
"""
UNKNOWN_LANES = 8  # sent at once to an engine that does not say how many it takes


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine at its operating point."""

    reuse: Reuse
    width: int  # jobs at once
    lanes: int | None = None  # that can be chosen: slots only
    look_ahead: int = 0  # more jobs in the engine's own queue: where all lanes end at once, none waits for us
    cells_total: int | None = None  # tokens all sequences can have together; None: unknown, or each lane has its own
    rates: MeasuredRates = field(default_factory=MeasuredRates)
    notes: tuple[str, ...] = ()  # why it is so, for a person
    point: SlotPoint | None = None  # None: the engine was used as it was found

    def __post_init__(self) -> None:
        if self.reuse == "slots" and self.lanes is None:
            raise ValueError("an engine with slots has lanes that can be chosen")


def shape_of(
    capabilities: Capabilities,
    identity: Identity,
    *,
    width: int | None = None,
    cells_total: int | None = None,
    rates: MeasuredRates | None = None,
) -> EngineShape:
    """The shape of an engine; `width`, `cells_total` and `rates` as its operating point has them, None: unknown."""
    reuse, why = _reuse(capabilities, identity)
    notes = [why]
    if width is None:
        width = identity.lanes or UNKNOWN_LANES
        if identity.lanes is None:
            notes.append(f"{width} at once: the engine does not say how many it takes, and none was measured")
    if identity.lanes is not None and width > identity.lanes:
        notes.append(f"{identity.lanes} at once instead of {width}: the engine has no more lanes")
        width = identity.lanes
    return EngineShape(
        reuse,
        max(1, width),
        identity.lanes if reuse == "slots" else None,
        look_ahead=max(2, width) if identity.kind == "native" else 0,
        cells_total=cells_total,
        rates=rates or MeasuredRates(),
        notes=tuple(notes),
    )


def _reuse(capabilities: Capabilities, identity: Identity) -> tuple[Reuse, str]:
    if capabilities.shares_prefixes and identity.kind == "native":
        return "shares", "sequences share the cells of a head"
    if capabilities.shares_prefixes:
        return "prefix cache", "what was computed is found again; the first job of a head goes ahead of the others"
    if capabilities.keeps_prefixes and capabilities.chooses_lanes and identity.lanes is not None:
        return "slots", "each lane keeps its own copy of a head: jobs with one head follow each other on one lane"
    if capabilities.keeps_prefixes:
        return "prefix cache", "lanes cannot be chosen: how much is found again is the engine's luck"
    if identity.kind == "url" and capabilities.reports_cached_tokens:
        return "prefix cache", "the server counts cached tokens, so it is taken to cache heads"
    return "none", "the engine does not reuse prompts: lines are worked in their own order"
