"""Changes that make a plan fit, cheapest first.

Tries the mildest change of every setting, then the next; combines two settings if no single one suffices.
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
from tokenmill.units import format_bytes, format_tok_s

MAX_CHANGES = 3
MIN_CONTEXT = 4096
Alternatives = Iterable[tuple[str, Profile]]
"""Names and profiles of smaller quantizations of the model; iterated only if the requested one does not fit."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A new value of one setting, or of two."""

    what: str
    cost: float  # loss of usefulness: 0 none, 1 everything
    profile: Profile
    changed: dict[str, Any] = field(default_factory=dict)  # fields of the goal to replace


_Fits = Callable[[Iterable[_Step]], Change | None]


def changes_that_fit(
    machine: Machine, profile: Profile, goal: Goal, plan: Plan, alternatives: Alternatives
) -> Iterator[Change]:
    """Yield at most `MAX_CHANGES` changes that make the plan fit, cheapest first."""
    cheap = list(_settings_steps(goal, plan.settings, profile))
    smaller = list[_Step]()

    def quants() -> Iterator[_Step]:
        for name, other in alternatives:
            smaller.append(_Step(f"quantization {name}", 0.5, other))
            yield smaller[-1]

    disk = [] if goal.allow_disk else [[_Step("--allow-disk", 0.95, profile, {"allow_disk": True})]]
    fits = partial(_fitting, machine, goal)
    found = list(islice(_in_turn([iter(steps) for steps in (*cheap, quants(), *disk)], fits), MAX_CHANGES))
    found = found or list(islice(filter(None, map(fits, _pairs([*cheap, smaller], fits))), MAX_CHANGES))
    yield from sorted(found, key=lambda change: change.cost)


def _in_turn(sources: list[Iterator[_Step]], fits: _Fits) -> Iterator[Change]:
    """Yield the steps that fit, round-robin: the mildest step of every setting, then the next."""
    waiting = deque(sources)
    while waiting:
        steps = waiting.popleft()
        change = fits(steps)
        if change is not None:
            yield change
            waiting.append(steps)  # resumes after this step


def _fitting(machine: Machine, goal: Goal, steps: Iterable[_Step]) -> Change | None:
    """The first step that fits, as a change; None if no step fits."""
    for step in steps:
        draft = make_draft(machine, step.profile, replace(goal, **step.changed), None, even=False)
        if not draft.shortfalls:
            return Change(step.what, _effect(machine, step.profile, draft), step.cost)
    return None


def _settings_steps(goal: Goal, settings: Settings, profile: Profile) -> Iterator[list[_Step]]:
    """The steps of every setting, mildest first; settings in order of cost."""
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
        _Step(f"--context {length}", 0.4, profile, {"context": length}) for length in lengths if length >= MIN_CONTEXT
    ]


def _pairs(sources: list[list[_Step]], fits: _Fits) -> Iterator[list[_Step]]:
    """Pairs of settings that fit at their last steps: the first at its last step, the second step by step."""
    for first, second in combinations(filter(None, sources), 2):
        steps = [_joined(first[-1], step) for step in second]
        if fits(steps[-1:]) is not None:
            yield steps


def _joined(one: _Step, other: _Step) -> _Step:
    """Both steps combined, with the model of `other`, because quantizations always come last."""
    cost = min(1.0, one.cost + other.cost)
    return _Step(f"{one.what} and {other.what}", cost, other.profile, one.changed | other.changed)


def _effect(machine: Machine, profile: Profile, draft: PlanDraft) -> str:
    speed = decode_speed(machine, profile, draft.settings, draft.placement, depth=0)
    words = f"weights {format_bytes(profile.bytes)}, KV {format_bytes(_item(draft.ledger, 'kv'))}"
    return words if speed is None else f"{words}, {format_tok_s(speed.tok_s)} tok/s predicted"


def _item(found: Ledger, item: str) -> int:
    return sum(row.bytes for row in found.full_context if row.item == item)
