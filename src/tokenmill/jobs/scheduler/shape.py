"""The properties of an engine that job order depends on: slots, prompt reuse and KV capacity."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.engine.engine import Capabilities, Identity
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.tuner.point import SlotPoint

Reuse = Literal["shares", "slots", "prefix cache", "none"]
"""How an engine reuses computed prompts.

shares: sequences share cells; a request waits inside the engine while another computes its prefix.
slots: each slot keeps the prompt of its last request; the client chooses the slot.
prefix cache: a request finds what was computed before it started; concurrent requests all compute.
none: every prompt is computed in full.
"""
UNKNOWN_LANES = 8  # concurrent jobs on an engine that does not report its number of slots


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine at its operating point."""

    reuse: Reuse
    width: int  # concurrent jobs
    lanes: int | None = None  # slots that the client can choose; reuse "slots" only
    look_ahead: int = 0  # additional jobs queued in the engine, so that no slot is idle while we react
    cells_total: int | None = None  # KV cells of all sequences together; None: unknown, or each slot has its own
    rates: MeasuredRates = field(default_factory=MeasuredRates)
    notes: tuple[str, ...] = ()  # reasons for the above, for the user
    point: SlotPoint | None = None  # None: the engine is used with the settings it had

    def __post_init__(self) -> None:
        if self.reuse == "slots" and self.lanes is None:
            raise ValueError("an engine whose slots are chosen by the client needs the number of its lanes")


def shape_of(
    capabilities: Capabilities,
    identity: Identity,
    *,
    width: int | None = None,
    cells_total: int | None = None,
    rates: MeasuredRates | None = None,
) -> EngineShape:
    """The shape of an engine. `width`, `cells_total` and `rates` come from its operating point; None: unknown."""
    reuse, why = _reuse(capabilities, identity)
    notes = [why]
    if width is None:
        width = identity.lanes or UNKNOWN_LANES
        if identity.lanes is None:
            notes.append(f"{width} jobs at a time: the engine does not report its slots, and none were measured")
    if identity.lanes is not None and width > identity.lanes:
        notes.append(f"{identity.lanes} jobs at a time instead of {width}: the engine has no more slots")
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
        return "shares", "sequences share the cells of a prefix"
    if capabilities.shares_prefixes:
        return "prefix cache", "computed prompts are reused; the first job of a prefix runs before the others"
    if capabilities.keeps_prefixes and capabilities.chooses_lanes and identity.lanes is not None:
        return (
            "slots",
            "each slot keeps its own copy of a prefix: jobs that share a prefix run one after another in one slot",
        )
    if capabilities.keeps_prefixes:
        return "prefix cache", "slots cannot be chosen: reuse depends on the engine"
    if identity.kind == "url" and capabilities.reports_cached_tokens:
        return "prefix cache", "the server counts cached tokens, so it is assumed to cache prefixes"
    return "none", "the engine does not reuse prompts: jobs run in line order"
