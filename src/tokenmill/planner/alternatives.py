"""Changes that make a plan fit, cheapest first, and the longest context that fits. Pure.

Suggests the mildest value of every setting that suffices; combines two settings if no single one does.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice
from typing import Any

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.draft import PlanDraft, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.placement import usable_gpus
from tokenmill.planner.plan import Change, Ledger, Placement, Plan, Settings
from tokenmill.planner.speed.forecast import decode_speed
from tokenmill.units import format_bytes, format_tok_s

MAX_CHANGES = 3
MIN_CONTEXT = 4096  # shorter ones are not suggested
CONTEXT_STEP = 256  # llama.cpp rounds contexts up to multiples of this
UNKNOWN_TRAINING_CONTEXT = 1 << 20  # upper limit of the search for models that do not state theirs
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


def longest_context(
    machine: Machine, profile: Profile, goal: Goal, placement: Placement | None = None, *, at_most: int | None = None
) -> int | None:
    """The longest context of each sequence that fits, by bisection; None if not even `CONTEXT_STEP` tokens fit.

    `at_most`: default: the context that the model was trained for. Settings that the goal leaves open have the engine's
    defaults: an f16 cache and micro-batches of 512 tokens.
    """

    def fits(context: int) -> bool:
        draft = make_draft(machine, profile, replace(goal, context=context), placement, even=False)
        return not draft.shortfalls

    most = at_most or profile.training_context or UNKNOWN_TRAINING_CONTEXT
    if fits(most):
        return most
    fitting, too_long = 0, -(-most // CONTEXT_STEP)
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if fits(middle * CONTEXT_STEP):
            fitting = middle
        else:
            too_long = middle
    return fitting * CONTEXT_STEP or None


def changes_that_fit(
    machine: Machine,
    profile: Profile,
    goal: Goal,
    plan: Plan,
    alternatives: Alternatives,
    placement: Placement | None = None,
) -> Iterator[Change]:
    """Yield at most `MAX_CHANGES` changes that make the plan fit, cheapest first; one of them is a shorter context.

    A given `placement` is kept by all changes but those of the quantization.
    """
    settings = _settings_steps(machine, goal, plan.settings, profile)
    contexts = settings.pop("context")
    smaller = list[_Step]()

    def quants() -> Iterator[_Step]:
        for name, other in alternatives:
            smaller.append(_Step(f"quantization {name}", 0.5, other))
            yield smaller[-1]

    disk = [] if goal.allow_disk else [_Step("--allow-disk", 0.95, profile, {"allow_disk": True})]
    # a smaller cache type allows a longer context even if it does not suffice
    types = [_joined(settings["cache type"][-1], step) for step in contexts] if settings["cache type"] else []
    sources = [contexts, *settings.values(), quants(), disk]
    fits = partial(_fitting, machine, goal, profile, placement)
    found = list(islice(filter(None, map(fits, sources)), MAX_CHANGES))
    if len(found) == 1:
        found += filter(None, [fits(types)])
    found = found or list(
        islice(filter(None, map(fits, _pairs([*settings.values(), contexts, smaller], fits))), MAX_CHANGES)
    )
    yield from sorted(found, key=lambda change: change.cost)


def _fitting(
    machine: Machine, goal: Goal, profile: Profile, placement: Placement | None, steps: Iterable[_Step]
) -> Change | None:
    """The first step that fits, as a change, with its context as long as possible; None if no step fits."""
    for step in steps:
        kept = placement if step.profile is profile else None
        wanted = replace(goal, **step.changed)
        draft = make_draft(machine, step.profile, wanted, kept, even=False)
        if draft.shortfalls:
            continue
        what = step.what
        shorter = step.changed.get("context")
        if shorter is not None:
            longest = longest_context(machine, step.profile, wanted, kept, at_most=2 * shorter) or shorter
            what = what.replace(f"--context {shorter}", f"--context {longest}")
            draft = make_draft(machine, step.profile, replace(wanted, context=longest), kept, even=False)
        return Change(what, _effect(machine, step.profile, draft), step.cost)
    return None


def _settings_steps(machine: Machine, goal: Goal, settings: Settings, profile: Profile) -> dict[str, list[_Step]]:
    """The steps of every setting, mildest first; settings in order of cost."""
    kinds = (("fp8", 0.1),) if goal.engine == "vllm" else (("q8_0", 0.1), ("q4_0", 0.25))
    counts = [settings.sequences >> halvings for halvings in range(1, settings.sequences.bit_length())]
    lengths = [settings.context >> halvings for halvings in range(1, settings.context.bit_length())]

    def steps(option: str, cost: float, values: Iterable[int], field_name: str) -> list[_Step]:
        return [_Step(f"{option} {value}", cost, profile, {field_name: value}) for value in values]

    return {
        "repack": [_Step("--no-repack", 0.03, profile, {"repack": False})] if settings.repack else [],
        "ubatch": steps("--ubatch", 0.05, [size for size in (256, 128) if size < settings.ubatch], "ubatch"),
        "cache type": [
            _Step(f"--cache-type {kind}", cost, profile, {"cache_type_k": kind, "cache_type_v": kind})
            for kind, cost in kinds
            if settings.cache_type_k == "f16"
        ],
        "tensor parallel": steps("--tensor-parallel", 0.2, _more_gpus(machine, goal, profile), "tensor_parallel"),
        "sequences": steps("--sequences", 0.3, counts, "sequences"),
        "context": steps("--context", 0.4, [length for length in lengths if length >= MIN_CONTEXT], "context"),
    }


def _more_gpus(machine: Machine, goal: Goal, profile: Profile) -> list[int]:
    """Larger numbers of GPUs over which vLLM could split the model on this machine."""
    if goal.engine != "vllm":
        return []
    gpus = len(usable_gpus(machine, goal))
    return [
        count for count in (2, 4, 8) if goal.tensor_parallel < count <= gpus and not (profile.heads or count) % count
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
