"""Engine properties that determine the order of jobs: slots, prompt reuse and KV capacity."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.engine.engine import Capabilities, Identity
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.tuner.point import SlotPoint

Reuse = Literal["shares", "slots", "prefix cache", "none"]
"""How an engine reuses computed prompts.

shares: sequences share KV cells; a request waits inside the engine while another computes its prefix.
slots: each slot keeps the prompt of its last request; the client chooses the slot.
prefix cache: a request reuses prefixes computed before it started; concurrent requests each compute their own.
none: every prompt is computed in full.
"""
_BRANCH_LOOK_AHEAD = 32  # with `needs_branches`: the queued jobs show the engine where their prompts diverge
DEFAULT_SLOTS = 8  # concurrent jobs on an engine that does not report its number of slots


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine at its operating point."""

    reuse: Reuse
    width: int  # concurrent jobs
    slots: int | None = None  # slots that the client can choose; reuse "slots" only
    look_ahead: int = 0  # additional jobs queued in the engine, so that no slot idles between two jobs
    cells_total: int | None = None  # KV cells of all sequences together; None: unknown, or each slot has its own
    rates: MeasuredRates = field(default_factory=MeasuredRates)
    notes: tuple[str, ...] = ()  # reasons for these values, shown to the user
    point: SlotPoint | None = None  # the measured operating point; None: the engine keeps its settings
    needs_branches: bool = False  # a prefix is shared only if the engine is told where prompts diverge

    def __post_init__(self) -> None:
        if self.reuse == "slots" and self.slots is None:
            raise ValueError('slots must be given if reuse is "slots"')


def shape_of(
    capabilities: Capabilities,
    identity: Identity,
    *,
    width: int | None = None,
    cells_total: int | None = None,
    rates: MeasuredRates | None = None,
) -> EngineShape:
    """Derive the shape of an engine; `width`, `cells_total` and `rates` are those of its operating point, if known."""
    native = identity.kind == "native"
    reuse, why = _reuse(capabilities, identity)
    notes = [why]
    if width is None:
        width = identity.slots or DEFAULT_SLOTS
        if identity.slots is None:
            notes.append(f"{width} jobs at a time: the engine does not report its slots, and none were measured")
    if identity.slots is not None and width > identity.slots:
        notes.append(f"{identity.slots} jobs at a time instead of {width}: the engine has no more slots")
        width = identity.slots
    return EngineShape(
        reuse,
        max(1, width),
        identity.slots if reuse == "slots" else None,
        look_ahead=max(_BRANCH_LOOK_AHEAD if capabilities.needs_branches else 2, width) if native else 0,
        cells_total=cells_total,
        rates=rates or MeasuredRates(),
        notes=tuple(notes),
        needs_branches=capabilities.needs_branches,
    )


def _reuse(capabilities: Capabilities, identity: Identity) -> tuple[Reuse, str]:
    if capabilities.copies_prefixes or (capabilities.shares_prefixes and identity.kind == "native"):
        how = "copy the prefixes of jobs" if capabilities.copies_prefixes else "share the cells of a prefix"
        return "shares", f"sequences {how}"
    if capabilities.shares_prefixes:
        return "prefix cache", "computed prompts are reused; the first job of a prefix runs before the others"
    if capabilities.keeps_prefixes and capabilities.chooses_slots and identity.slots is not None:
        return (
            "slots",
            "each slot keeps its own copy of a prefix: jobs that share a prefix run one after another in one slot",
        )
    if capabilities.keeps_prefixes:
        return "prefix cache", "slots cannot be chosen: reuse depends on the engine"
    if identity.kind == "url" and capabilities.reports_cached_tokens:
        return "prefix cache", "the server counts cached tokens, so it is assumed to cache prefixes"
    return "none", "the engine does not reuse prompts: jobs run in line order"
