"""Drafts one candidate plan: settings, placement and ledger, without a forecast."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner import vllm
from tokenmill.planner.compute_graph.ik_memory import fit_sizes, free_at_start, own_fit
from tokenmill.planner.goal import Goal
from tokenmill.planner.memory.costs import IkCosts, MemoryCosts, costs_of
from tokenmill.planner.memory.drafting import check_speculation, draft_bytes
from tokenmill.planner.memory.ledger import ledger
from tokenmill.planner.placement import assemble, host_tier, spill, usable_gpus
from tokenmill.planner.plan import Decision, Ledger, Placement, Settings, Shortfall
from tokenmill.planner.settings import choose_settings
from tokenmill.planner.speed.offload import choose_min_batch, offloaded_decode
from tokenmill.planner.split import Layer, split
from tokenmill.units import format_bytes, format_tok_s


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A plan without its forecast."""

    settings: Settings
    placement: Placement
    ledger: Ledger
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...]


def make_draft(
    machine: Machine, profile: Profile, goal: Goal, placement: Placement | None, *, even: bool = True
) -> PlanDraft:
    """Draft a plan for one goal.

    A given `placement` is kept and only its bytes are counted. With `even=False` the search for a placement is faster
    but fills the GPUs less evenly.
    """
    check_speculation(profile, goal)
    gpus = usable_gpus(machine, goal)
    settings, decisions = choose_settings(machine, profile, goal, with_gpu=bool(gpus))
    if goal.engine == "vllm":
        return _vllm_draft(machine, profile, goal, settings, decisions)
    decisions = (*decisions, *_speculation_decision(goal))
    costs = costs_of(profile, settings)
    given = placement is not None
    if placement is None:
        placement, reasons = _place(machine, profile, goal, costs, gpus, even=even)
        decisions += reasons
    settings, reason = _layout(machine, costs, placement, goal)
    decisions = (*decisions, *reason)
    costs = costs_of(profile, settings)
    found = ledger(machine, costs, placement, goal)
    placement, found = _spilled(machine, costs, placement, goal, found)
    if not given or goal.offload_min_batch is not None:  # an existing placement is run with its own environment
        rows = choose_min_batch(machine, profile, settings, placement, goal.offload_min_batch)
        settings = replace(settings, offload_min_batch=rows)
        decisions = (*decisions, *_offload_decision(machine, profile, settings, placement))
    return PlanDraft(settings, placement, found, decisions, tuple(_shortfalls(machine, found)))


def _speculation_decision(goal: Goal) -> Iterator[Decision]:
    """What drafts tokens, if anything does."""
    wanted = goal.speculation
    if wanted is not None:
        source = "layers for multi-token prediction" if wanted.model is None else wanted.model.name
        yield Decision(
            "speculative decoding",
            f"{wanted.tokens} tokens per step, drafted by {source}",
            "the forecast does not count them, because their gain depends on how many the model accepts",
        )


def _offload_decision(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement
) -> Iterator[Decision]:
    """The decision that decoding copies host experts to the GPU, if it does."""
    found = offloaded_decode(machine, profile, settings, placement)
    if found is not None:
        yield Decision(
            "decoding",
            "experts copied to the GPU in every step",
            f"{format_tok_s(found.gpu_tok_s)} tok/s predicted for {settings.sequences} sequences, "
            f"{found.cpu_tok_s:.3g} if the CPU computes the experts",
        )


def _vllm_draft(
    machine: Machine, profile: Profile, goal: Goal, settings: Settings, decisions: tuple[Decision, ...]
) -> PlanDraft:
    """Draft a vLLM plan: vLLM fills its share of the GPUs, so the number of KV tokens is a result."""
    gpus = usable_gpus(machine, goal)
    if max(1, len(gpus)) < goal.tensor_parallel:
        raise UsageError(
            f"--tensor-parallel {goal.tensor_parallel} needs {goal.tensor_parallel} GPUs, and {len(gpus)} can be used",
            hint=f"--tensor-parallel {max(1, len(gpus))}",
        )
    if profile.heads and profile.heads % goal.tensor_parallel:
        raise UsageError(
            f"vLLM cannot split the {profile.heads} attention heads of {profile.name} over {goal.tensor_parallel} GPUs",
            hint="--tensor-parallel 1, 2, 4 or 8",
        )
    placement, found, tokens = vllm.place(machine, profile, settings, goal)
    needed = round(vllm.bytes_per_token(profile, settings) * settings.cells)
    why = f"{settings.gpu_memory_utilization:.0%} of each GPU minus weights and activations, in blocks of {vllm.BLOCK}"
    if not gpus:
        why = f"{settings.sequences} sequences of {settings.context} tokens, in blocks of {vllm.CPU_BLOCK}"
    decisions = (*decisions, Decision("kv tokens", str(tokens), why))
    shortfalls = list(_shortfalls(machine, found))
    available = sum(row.bytes for row in found.full_context if row.item == "kv")
    if tokens < settings.cells and not shortfalls:
        shortfalls.append(Shortfall(gpus[0], needed, min(available, needed - 1), "full_context", "kv"))
    return PlanDraft(settings, placement, found, decisions, tuple(shortfalls))


def _place(
    machine: Machine, profile: Profile, goal: Goal, costs: MemoryCosts, gpus: tuple[str, ...], *, even: bool
) -> tuple[Placement, tuple[Decision, ...]]:
    host = host_tier(machine)
    count = profile.layers
    if not gpus:
        why = "--cpu-only" if goal.cpu_only else "the goal allows no GPU" if machine.gpus else "the machine has no GPU"
        return assemble(profile, host, [host] * count, host, frozenset(), predicts=costs.settings.mtp), (
            Decision("placement", f"all in {host}", why),
        )
    if goal.own_fit:
        return _own_fit(machine, goal, costs, gpus)
    layers = [Layer(costs.base(index), costs.experts(index)) for index in range(count)]
    every = range(count)
    drafting = costs.prediction + draft_bytes(profile, costs.settings, goal.speculation)
    overhead = {
        (head, staged): max(costs.runtime(len(gpus), machine.capability(gpu)) for gpu in gpus)
        + costs.growth(every)
        + costs.compute(every, head=head)
        + (costs.head + drafting if head else 0)
        + (costs.staging(every, head=head, staged=every) if staged else 0)
        for head in (False, True)
        for staged in (False, True)
    }
    available = [max(0, capacity(machine, gpu) - goal.gpu_margin_bytes) for gpu in gpus]
    found = split(layers, available, lambda _card, head, staged: overhead[head, staged], even=even)
    if found.first:
        # Large batches of host layers are computed on the first GPU.
        lent = costs.lent(range(found.first))
        found = split(
            layers, available, lambda card, head, staged: overhead[head, staged] + (0 if card else lent), even=even
        )
    devices = [host] * found.first
    resident: set[int] = set()
    for gpu, share in zip(gpus, found.shares, strict=True):
        devices += [gpu] * (share.stop - share.start)
        resident.update(share.experts)
    head = devices[-1]
    placement = assemble(profile, host, devices, head, frozenset(resident), predicts=costs.settings.mtp)
    return placement, (_placement_reason(profile, found.first, found.expert_layers, host),)


def _own_fit(
    machine: Machine, goal: Goal, costs: MemoryCosts, gpus: tuple[str, ...]
) -> tuple[Placement, tuple[Decision, ...]]:
    """The placement by the engine's own `--fit`; raises `UsageError` for engines other than ik_llama.cpp."""
    if not isinstance(costs, IkCosts):
        raise UsageError(
            f"--own-fit cannot predict the placement of {goal.engine}", hint="omit it, or use --engine ik_llama"
        )
    sizes = fit_sizes(costs.profile, costs.settings, options=costs.options)
    free = [free_at_start(capacity(machine, gpu)) for gpu in gpus]
    found = own_fit(sizes, free, goal.fit_margin_bytes, options=costs.options)
    if found.too_small:
        names = ", ".join(gpus[index] for index in found.too_small)
        raise UsageError(
            f"ik_llama.cpp's --fit would refuse to start: the layers of {names} do not fit even without experts",
            hint="use a smaller --fit-margin or --context, or omit --own-fit",
        )
    host = host_tier(machine)
    devices = [host if index is None else gpus[index] for index in found.layers]
    resident = frozenset(layer for held in found.experts for layer in held)
    reason = (
        "ik_llama.cpp divides layers by free memory, then moves experts to the host until they fit, last layers first"
    )
    return assemble(costs.profile, host, devices, gpus[found.head], resident), (
        Decision("placement", "the engine's own --fit", reason),
    )


def _placement_reason(profile: Profile, first: int, held: int, host: str) -> Decision:
    having = sum(1 for layer in range(profile.layers) if _has_experts(profile, layer))
    every = "attention of all layers on GPUs" if having else "all layers on GPUs"
    parts = [f"layers {first}-{profile.layers - 1} on GPUs" if first else every]
    reason = "the GPUs hold the whole model"
    if having:
        parts.append(f"experts of {held} of {having} layers on GPUs, the others in {host}")
    if held < having:
        reason = "a token reads few of the experts but all other weights, so those go to the fastest memory first"
    if first:
        reason = f"the GPUs hold the attention, KV cache and buffers of at most {profile.layers - first} layers"
    return Decision("placement", "; ".join(parts), reason)


def _has_experts(profile: Profile, layer: int) -> bool:
    return any(t.layer == layer and t.cls is TensorClass.ROUTED_EXPERTS for t in profile.tensors)


def _layout(
    machine: Machine, costs: MemoryCosts, placement: Placement, goal: Goal
) -> tuple[Settings, tuple[Decision, ...]]:
    """Choose mmap and repacking; keep only one copy of the weights if two do not fit."""
    settings = costs.settings
    if goal.mmap is not None and goal.repack is not None:
        return settings, ()
    decisions = []
    host = host_tier(machine)
    available = capacity(machine, host)
    mapped = replace(settings, mmap=True if goal.mmap is None else goal.mmap)
    is_open = goal.mmap is None and settings.repack

    def peak(candidate: Settings) -> int:
        return ledger(machine, costs_of(costs.profile, candidate), placement, goal).total(host, "load_peak")

    if goal.mmap is None and costs.moves_to_gpu and _streams(costs, placement):
        read = replace(settings, mmap=False)
        if peak(read) <= available:
            reason = "experts are copied to the GPU several times faster from pinned memory than from a mapped file"
            return read, (Decision("mmap", "off", reason),)
    total = peak(mapped)
    if total <= available:
        settings = mapped
        if goal.mmap is None:
            decisions.append(Decision("mmap", "on", "the file stays in the page cache, so the next load is faster"))
    elif (
        is_open
        and goal.repack is None
        and _slower_tiers(machine, goal)
        and peak(replace(settings, mmap=False)) > available
    ):
        settings = replace(mapped, repack=False)
        reason = f"weights that exceed {host} are read from the mapped file, which cannot be repacked"
        decisions.append(Decision("repack", "off", reason))
    elif is_open:
        settings = replace(settings, mmap=False)
        decisions.append(
            Decision("mmap", "off", f"mapped file and repacked copy together need {format_bytes(total)} of {host}")
        )
    return settings, tuple(decisions)


def _streams(costs: MemoryCosts, placement: Placement) -> bool:
    """Whether a layer computed on a GPU has its experts in host memory."""
    return any(
        tensor.cls is TensorClass.ROUTED_EXPERTS
        and not home.startswith("gpu")
        and placement.device_of(tensor).startswith("gpu")
        for tensor, home in zip(costs.profile.tensors, placement.homes, strict=True)
    )


def capacity(machine: Machine, tier: str) -> int:
    """Usable bytes of a tier: free memory if known, within the limits of this process."""
    found = next((item for item in machine.tiers() if item.name == tier), None)
    if found is None:
        return 0
    size = found.capacity_bytes or 0
    if found.kind in ("dram", "pmem") and machine.limits.cgroup_memory_bytes is not None:
        size = min(size, machine.limits.cgroup_memory_bytes)
    return size if found.free_bytes is None or found.kind == "disk" else min(size, found.free_bytes)


def _spilled(
    machine: Machine, costs: MemoryCosts, placement: Placement, goal: Goal, found: Ledger
) -> tuple[Placement, Ledger]:
    """Move whole layers' experts that exceed host memory to persistent memory, then to disk if allowed."""
    host = host_tier(machine)
    over = found.needed(host, "load_peak") - capacity(machine, host)
    if over <= 0:
        return placement, found
    slower = _slower_tiers(machine, goal)
    if not slower or not costs.settings.mmap:
        return placement, found
    moved = spill(costs.profile, placement, host, over, [(name, capacity(machine, name)) for name in slower])
    return moved, ledger(machine, costs, moved, goal)


def _slower_tiers(machine: Machine, goal: Goal) -> list[str]:
    """Tiers from which a mapped file is read in place: PMem with a file system, then disk if the goal allows it."""
    host = host_tier(machine)
    pmem = [tier.name for tier in machine.tiers() if tier.kind == "pmem" and tier.name != host]
    return [*pmem, "disk"] if goal.allow_disk and machine.disk is not None else pmem


def _shortfalls(machine: Machine, found: Ledger) -> Iterator[Shortfall]:
    moments: tuple[Literal["load_peak", "full_context"], ...] = ("load_peak", "full_context")
    for tier in machine.tiers():
        available = capacity(machine, tier.name)
        for moment in moments:
            needed = found.needed(tier.name, moment)
            if needed > available:
                yield Shortfall(tier.name, needed, available, moment)
                break
