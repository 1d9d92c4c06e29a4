"""`make(machine, profile, goal)` returns a `Plan`. Pure.

It takes the first context and cache type that fit in memory, then the micro-batch and number of sequences with the
best predicted speed. Every choice that the goal leaves open is recorded as a `Decision` with its reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.alternatives import Alternatives, changes_that_fit, longest_context
from tokenmill.planner.compute_graph.llama_cpp import EXACT, undrawn
from tokenmill.planner.draft import PlanDraft, capacity, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import Decision, Placement, Plan
from tokenmill.planner.settings import DEFAULT_CONTEXT
from tokenmill.planner.speed.calibration import Calibration
from tokenmill.planner.speed.forecast import decode_speed, forecast
from tokenmill.planner.speed.job_time import job_time, job_times
from tokenmill.units import format_bytes, format_gb_s, format_tok_s

UBATCHES = (512, 1024, 2048, 4096, 256, 128)  # candidates, in order of preference; 512 is the engines' default
SEQUENCES = (1, 2, 4, 8, 16)  # candidates; with more, engines start to copy host experts to the GPU in every step
JOB_PROMPT, JOB_OUTPUT = 4096, 512  # reference job for comparing settings: a document in, a page out
TIGHT_SHARE = 0.95  # of host memory: a published load above this needed swap, although the ledger had room
MIN_SPEEDUP = 1.03  # a setting must be faster by this factor to justify its memory


def make(
    machine: Machine,
    profile: Profile,
    goal: Goal,
    *,
    placement: Placement | None = None,
    alternatives: Alternatives = (),
    calibration: Calibration | None = None,
) -> Plan:
    """Plan a model on a machine; a given `placement` is kept and only its bytes are counted.

    `alternatives` are smaller quantizations to suggest if the plan does not fit. `calibration` corrects the forecast by
    this machine's recorded runs. Raises `UsageError` for a missing GPU.
    """
    missing = sorted(set(goal.gpus or ()) - {gpu.index for gpu in machine.gpus})
    if missing and not goal.cpu_only:
        available = ", ".join(str(gpu.index) for gpu in machine.gpus) or "none"
        raise UsageError(
            f"{machine.name} has no GPU {', '.join(map(str, missing))}", hint=f"available GPUs: {available}"
        )
    best = _choose(machine, profile, goal, placement, calibration)
    plan = _finished(machine, profile, goal, best, calibration)
    if plan.fits:
        return plan
    longest = longest_context(machine, profile, goal, placement, at_most=plan.settings.context)
    changes = tuple(changes_that_fit(machine, profile, goal, plan, alternatives, placement))
    return replace(plan, changes=changes, longest_context=longest)


def _choose(
    machine: Machine, profile: Profile, goal: Goal, placement: Placement | None, calibration: Calibration | None
) -> PlanDraft:
    """The best draft: the first context and cache type that fit, then the fastest micro-batch and sequences."""
    first: PlanDraft | None = None
    options = list(_memory_options(profile, goal))
    least = options[-1][0]
    if make_draft(machine, profile, replace(least, ubatch=min(_ubatches(least))), placement, even=False).shortfalls:
        options = options[:1]  # the smallest option does not fit: one draft shows why
    for asked, reasons in options:
        sizes = _ubatches(asked)
        drafts = [make_draft(machine, profile, replace(asked, ubatch=s), placement, even=False) for s in sizes]
        first = first or drafts[0]
        fitting = [draft for draft in drafts if not draft.shortfalls]
        if not fitting:
            continue
        best = _fastest(machine, profile, fitting, calibration)
        settled = replace(asked, ubatch=best.settings.ubatch)
        sequences, why = _sequences(machine, profile, settled, placement, calibration)
        draft = make_draft(machine, profile, replace(settled, sequences=sequences), placement)
        size = () if goal.ubatch is not None else (_ubatch_reason(machine, profile, draft, calibration),)
        return replace(draft, decisions=(*draft.decisions, *reasons, *size, *why))
    assert first is not None  # noqa: S101  there is always an option
    return first


def _memory_options(profile: Profile, goal: Goal) -> Iterator[tuple[Goal, tuple[Decision, ...]]]:
    """Candidates for context and cache type, best first; a smaller cache type is tried before a shorter context."""
    longest = min(DEFAULT_CONTEXT, profile.training_context or DEFAULT_CONTEXT)
    contexts = [goal.context] if goal.context is not None else [longest >> halvings for halvings in range(4)]
    open_type = goal.cache_type_k is None and goal.cache_type_v is None and goal.engine != "vllm"
    for context in contexts:
        for kind in ("f16", "q8_0") if open_type else (goal.cache_type_k,):
            reasons = []
            if goal.context is None:
                why = "the default" if context == DEFAULT_CONTEXT else "the longest that the model was trained for"
                if context < longest:
                    why = f"{2 * context} tokens do not fit in memory"
                reasons.append(Decision("context", str(context), f"{why}; set another with --context"))
            if open_type:
                why = "full precision fits" if kind == "f16" else "f16 does not fit; q8_0 needs half its memory"
                reasons.append(Decision("cache type", str(kind), why))
            asked = replace(goal, context=context)
            yield replace(asked, cache_type_k=kind, cache_type_v=kind) if open_type else asked, tuple(reasons)


def _ubatches(goal: Goal) -> tuple[int, ...]:
    if goal.ubatch is not None:
        return (goal.ubatch,)
    largest = min(goal.context or DEFAULT_CONTEXT, goal.batch or max(UBATCHES))
    return tuple(size for size in UBATCHES if size <= largest) or (largest,)


def _fastest(
    machine: Machine, profile: Profile, drafts: Sequence[PlanDraft], calibration: Calibration | None
) -> PlanDraft:
    """The draft that finishes the reference job first; a later draft must be faster by `MIN_SPEEDUP`."""
    best = drafts[0]
    least = _job_seconds(machine, profile, drafts[0], calibration)
    for draft in drafts[1:]:
        seconds = _job_seconds(machine, profile, draft, calibration)
        if seconds is not None and least is not None and seconds * MIN_SPEEDUP < least:
            best = draft
            least = seconds
    return best


def _sequences(
    machine: Machine, profile: Profile, goal: Goal, placement: Placement | None, calibration: Calibration | None
) -> tuple[int, tuple[Decision, ...]]:
    """Double the number of sequences while that adds 10 % to the speed and moves no experts off the GPUs."""
    if goal.sequences is not None or goal.engine == "vllm":
        return goal.sequences or 1, ()
    chosen = 1
    most_held = 0
    rates = dict[int, float]()
    for count in SEQUENCES:
        draft = make_draft(machine, profile, replace(goal, sequences=count), placement, even=False)
        depth = draft.settings.context // 4
        speed = decode_speed(
            machine, profile, draft.settings, draft.placement, depth=depth, sequences=count, calibration=calibration
        )
        held = sum(home.startswith("gpu") for home in draft.placement.homes)
        if speed is None or draft.shortfalls or (rates and (held < most_held or speed.tok_s < 1.1 * rates[chosen])):
            break
        most_held = max(most_held, held)
        chosen, rates[count] = count, speed.tok_s
    if not rates:
        return 1, (Decision("sequences", "1", "no decode forecast to compare others; set it with --sequences"),)
    why = f"{format_tok_s(rates[chosen])} tok/s in total"
    if chosen > 1:
        why += f", {format_tok_s(rates[1])} with one sequence"
    if chosen < SEQUENCES[-1]:
        why += f"; {2 * chosen} add less than 10 % or do not fit"
    return chosen, (Decision("sequences", str(chosen), why),)


def _job_seconds(machine: Machine, profile: Profile, draft: PlanDraft, calibration: Calibration | None) -> float | None:
    prompt = min(JOB_PROMPT, max(1, draft.settings.context // 2))
    found = job_time(
        machine,
        profile,
        draft.settings,
        draft.placement,
        prompt=prompt,
        answer=JOB_OUTPUT,
        calibration=calibration,
    )
    return None if found is None else found.prefill_s + found.decode_s


def _ubatch_reason(machine: Machine, profile: Profile, draft: PlanDraft, calibration: Calibration | None) -> Decision:
    ubatch = draft.settings.ubatch
    seconds = _job_seconds(machine, profile, draft, calibration)
    reason = "the engine's default; no forecast to compare other sizes"
    if seconds is not None:
        reason = f"fastest for {JOB_PROMPT} prompt and {JOB_OUTPUT} output tokens: {seconds:.0f} s predicted"
    return Decision("ubatch", str(ubatch), reason)


def _finished(
    machine: Machine, profile: Profile, goal: Goal, draft: PlanDraft, calibration: Calibration | None
) -> Plan:
    speed = forecast(machine, profile, draft.settings, draft.placement, calibration=calibration)
    jobs = job_times(machine, profile, draft.settings, draft.placement, calibration)
    return Plan(
        machine=machine,
        profile=profile,
        goal=goal,
        settings=draft.settings,
        placement=draft.placement,
        ledger=draft.ledger,
        forecast=replace(speed, jobs=jobs),
        decisions=(*draft.decisions, *_corrections(calibration), *_exactness(profile, draft)),
        shortfalls=draft.shortfalls,
        warnings=tuple(_warnings(machine, profile, draft)),
        calibration=calibration,
    )


def _corrections(calibration: Calibration | None) -> Iterator[Decision]:
    """Decisions that record how calibration changed the forecast."""
    if calibration is None:
        return
    for tier, rate in calibration.tier_gb_s.items():
        yield Decision(
            f"{tier} rate", format_gb_s(rate), "reached while decoding; measure it with tokenmill probe --measure"
        )
    for kind, correction in (("decode", calibration.decode), ("prefill", calibration.prefill)):
        if correction is not None:
            yield Decision(f"{kind} forecast", f"times {1 / correction.factor:.2f}", correction.grounds)


def _exactness(profile: Profile, draft: PlanDraft) -> Iterator[Decision]:
    """The decision that compute buffers are approximate, where they were not compared with llama.cpp."""
    if draft.settings.engine == "llama.cpp" and profile.architecture not in EXACT:
        reason = f"the graph of {profile.architecture!r} was not compared with llama.cpp; plan --verify compares it"
        yield Decision("compute buffers", "approximate", reason)


def _warnings(machine: Machine, profile: Profile, draft: PlanDraft) -> Iterator[str]:
    yield from _tight(machine, draft)
    if draft.settings.engine == "llama.cpp" and undrawn(profile):
        yield (
            f"the compute buffers of {profile.architecture!r} are approximate and probably too low:"
            " some of its layers are of a kind that is not drawn exactly"
        )
    if profile.training_context and draft.settings.context > profile.training_context:
        yield (
            f"{profile.name} was trained for {profile.training_context} tokens of context, not"
            f" {draft.settings.context}: answers beyond that need RoPE scaling, and may be poor even with it"
        )
    for row in draft.ledger.page_cache:
        tier = next(tier for tier in machine.tiers() if tier.name == row.tier)
        if draft.ledger.total(row.tier) > (tier.capacity_bytes or 0):
            yield (
                f"{row.tier} cannot keep {format_bytes(row.bytes)} of the mapped file next to the repacked copy:"
                " every start reads them from disk again; --no-repack avoids the copy"
            )
    if any(home == "disk" for home in draft.placement.homes):
        yield "some experts stay on disk, so decoding runs at the disk's speed; a smaller quantization avoids that"
    if host_tier(machine) != "pmem" and any(home == "pmem" for home in draft.placement.homes):
        spaces = machine.pmem.namespaces if machine.pmem else ()
        mounts = ", ".join(space.mount for space in spaces if space.mount) or "a DAX file system there"
        yield f"some experts are read from persistent memory in place: put the model file on {mounts}"
    for tier in machine.tiers():
        if tier.capacity_bytes is None and tier.kind != "disk":
            yield f"the size of {tier.name} is unknown and counts as 0; state it in the machine file"


def _tight(machine: Machine, draft: PlanDraft) -> Iterator[str]:
    """A warning if loading leaves little host memory; pages of a mapped file can be dropped, so it needs no warning."""
    host = host_tier(machine)
    available = capacity(machine, host)
    needed = draft.ledger.needed(host, "load_peak")
    if draft.settings.mmap or draft.shortfalls or not available or needed <= TIGHT_SHARE * available:
        return
    swap = machine.swap.total_bytes if machine.swap is not None else None
    there = f" (this machine has {format_bytes(swap)})" if swap else ""
    yield (
        f"loading needs {format_bytes(needed)} of {format_bytes(available)} of {host}: without swap{there} the engine"
        " may be killed while it loads; more experts on the GPUs avoid that"
    )
