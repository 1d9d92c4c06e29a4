"""Changes that make a plan fit, cheapest first.

Tries the mildest value of every knob, then the next one; combines two knobs where no single one suffices.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice
from typing import Any

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.draft import PlanDraft, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Change, Ledger, Plan, Settings
from tokenmill.planner.speed.forecast import decode_speed
from tokenmill.units import format_bytes

MOST_CHANGES = 3
SHORTEST_CONTEXT = 4096
Alternatives = Iterable[tuple[str, Profile]]
"""Smaller quantisations of the same model, by name; called only when the requested one does not fit."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A new value for one knob, or for each of two."""

    what: str
    cost: float  # loss of usefulness: 0 none, 1 everything
    profile: Profile
    changed: dict[str, Any] = field(default_factory=dict)  # fields of the goal to replace


_Fits = Callable[[Iterable[_Step]], Change | None]


def changes_that_fit(
    machine: Machine, profile: Profile, goal: Goal, plan: Plan, alternatives: Alternatives
) -> Iterator[Change]:
    """Yield at most three changes that make the plan fit, cheapest first."""
    cheap = list(_knobs(goal, plan.settings, profile))
    smaller = list[_Step]()

    def quants() -> Iterator[_Step]:
        for name, other in alternatives:
            smaller.append(_Step(f"quantisation {name}", 0.5, other))
            yield smaller[-1]

    disk = [] if goal.allow_disk else [[_Step("--allow-disk", 0.95, profile, {"allow_disk": True})]]
    fits = partial(_fitting, machine, goal)
    found = list(islice(_in_turn([iter(knob) for knob in (*cheap, quants(), *disk)], fits), MOST_CHANGES))
    found = found or list(islice(filter(None, map(fits, _pairs([*cheap, smaller], fits))), MOST_CHANGES))
    yield from sorted(found, key=lambda change: change.cost)


def _in_turn(knobs: list[Iterator[_Step]], fits: _Fits) -> Iterator[Change]:
    """Yield the steps that fit, round-robin: the mildest step of every knob, then the next."""
    waiting = deque(knobs)
    while waiting:
        knob = waiting.popleft()
        change = fits(knob)
        if change is not None:
            yield change
            waiting.append(knob)  # resumes after this step


def _fitting(machine: Machine, goal: Goal, steps: Iterable[_Step]) -> Change | None:
    """The first step that fits; None if none does."""
    for step in steps:
        draft = make_draft(machine, step.profile, replace(goal, **step.changed), None, even=False)
        if not draft.shortfalls:
            return Change(step.what, _effect(machine, step.profile, draft), step.cost)
    return None


def _knobs(goal: Goal, settings: Settings, profile: Profile) -> Iterator[list[_Step]]:
    """The values of every knob except the model's, mildest first; knobs in order of cost."""
    if settings.repack:
        yield [_Step("--no-repack", 0.03, profile, {"repack": False})]
    sizes = [size for size in (256, 128) if size < settings.ubatch]
    yield [_Step(f"--ubatch {size}", 0.05, profile, {"ubatch": size}) for size in sizes]
    kinds = (("fp8", 0.1),) if goal.engine == "vllm" else (("q8_0", 0.1), ("q4_0", 0.25))
    if settings.cache_type_k == "f16":
        yield [
            _Step(f"--cache-type {kind}", cost, profile, {"cache_type_k": kind, "cache_type_v": kind})
            for kind, cost in kinds
        ]
    counts = [settings.sequences >> halvings for halvings in range(1, settings.sequences.bit_length())]
    yield [_Step(f"--sequences {count}", 0.3, profile, {"sequences": count}) for count in counts]
    lengths = [settings.context >> halvings for halvings in range(1, settings.context.bit_length())]
    yield [
        _Step(f"--context {length}", 0.4, profile, {"context": length})
        for length in lengths
        if length >= SHORTEST_CONTEXT
    ]


def _pairs(knobs: list[list[_Step]], fits: _Fits) -> Iterator[list[_Step]]:
    """Pairs of knobs that fit when both are turned fully: the first fully, the second step by step."""
    turned = [knob for knob in knobs if knob]
    for first, second in combinations(turned, 2):
        steps = [_joined(first[-1], step) for step in second]
        if fits(steps[-1:]) is not None:
            yield steps


def _joined(one: _Step, other: _Step) -> _Step:
    """Both steps combined, with the model of `other`: quantisations are always the last knob."""
    cost = min(1.0, one.cost + other.cost)
    return _Step(f"{one.what} and {other.what}", cost, other.profile, one.changed | other.changed)


def _effect(machine: Machine, profile: Profile, draft: PlanDraft) -> str:
    speed = decode_speed(machine, profile, draft.settings, draft.placement, depth=0)
    words = f"weights {format_bytes(profile.bytes)}, KV {format_bytes(_item(draft.ledger, 'kv'))}"
    return words if speed is None else f"{words}, {speed.tok_s:.3g} tok/s forecast"


def _item(found: Ledger, item: str) -> int:
    return sum(row.bytes for row in found.full_context if row.item == item)
