"""What would make a plan fit: one change at a time, the cheapest first."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.plan.draft import Draft, make_draft
from tokenmill.plan.forecast import decode_speed
from tokenmill.plan.goal import Goal
from tokenmill.plan.plan import Change, Ledger, Plan, Settings
from tokenmill.units import format_bytes

MOST_CHANGES = 3
Alternatives = Iterable[tuple[str, Profile]]
"""Smaller quantisations of the same model, by name; asked for only when this one does not fit."""


def changes_that_fit(
    machine: Machine, profile: Profile, goal: Goal, plan: Plan, alternatives: Alternatives
) -> Iterator[Change]:
    """The cheapest changes that make it fit, at most three."""
    found = []
    for what, cost, changed, other in _candidates(goal, plan.settings, profile, alternatives):
        draft = make_draft(machine, other, changed, None, even=False)
        if not draft.shortfalls:
            found.append(Change(what, _effect(machine, other, draft), cost))
            if len(found) == MOST_CHANGES:
                break
    yield from found


def _candidates(
    goal: Goal, settings: Settings, profile: Profile, alternatives: Alternatives
) -> Iterator[tuple[str, float, Goal, Profile]]:
    """Changes to try, the cheapest first: (words, cost, goal, model)."""
    if settings.repack:
        yield "--no-repack", 0.03, replace(goal, repack=False), profile
    if settings.ubatch > 128:
        for size in (256, 128):
            yield f"--ubatch {size}", 0.05, replace(goal, ubatch=size), profile
    for kind, cost in (("fp8", 0.1),) if goal.engine == "vllm" else (("q8_0", 0.1), ("q4_0", 0.25)):
        if settings.cache_type_k == "f16":
            yield f"--cache-type {kind}", cost, replace(goal, cache_type_k=kind, cache_type_v=kind), profile
    sequences = settings.sequences
    while sequences > 1:
        sequences //= 2
        yield f"--sequences {sequences}", 0.3, replace(goal, sequences=sequences), profile
    context = settings.context
    while context > 4096:
        context //= 2
        yield f"--context {context}", 0.4, replace(goal, context=context), profile
    for name, other in alternatives:
        yield f"quantisation {name}", 0.5, goal, other
    if not goal.allow_disk:
        yield "--allow-disk", 0.95, replace(goal, allow_disk=True), profile


def _effect(machine: Machine, profile: Profile, draft: Draft) -> str:
    speed = decode_speed(machine, profile, draft.settings, draft.placement, depth=0)
    words = f"weights {format_bytes(profile.bytes)}, KV {format_bytes(_item(draft.ledger, 'kv'))}"
    return words if speed is None else f"{words}, {speed.tok_s:.3g} tok/s forecast"


def _item(found: Ledger, item: str) -> int:
    return sum(row.bytes for row in found.full_context if row.item == item)
