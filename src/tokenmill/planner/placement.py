"""Assigns every tensor to a memory tier.

Attention, norms, routers, shared experts, dense layers and the output go to the fastest memory that holds them;
whole layers' routed experts fill the rest of each GPU; what remains goes to host memory, then to persistent memory
and, if allowed, to disk. Experts live with their layer or on the host, never on another GPU.
"""

import re
from collections import Counter
from collections.abc import Sequence

from tokenmill.hardware.machine import Machine
from tokenmill.model.architectures import classify
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.goal import OS_RESERVE_BYTES, OS_RESERVE_SHARE, Goal
from tokenmill.planner.plan import Placement

EXPERTS = TensorClass.ROUTED_EXPERTS


def host_tier(machine: Machine) -> str:
    """The CPU's memory tier: dram, or pmem if DRAM is only its cache."""
    return next((tier.name for tier in machine.tiers() if tier.kind in ("dram", "pmem")), "dram")


def os_reserve(machine: Machine) -> int:
    """Bytes of host memory reserved for the operating system."""
    size = next((tier.capacity_bytes for tier in machine.tiers() if tier.kind in ("dram", "pmem")), None) or 0
    return min(OS_RESERVE_BYTES, round(OS_RESERVE_SHARE * size))


def usable_gpus(machine: Machine, goal: Goal) -> tuple[str, ...]:
    """GPU tiers allowed by the goal, in order."""
    allowed = [gpu.index for gpu in machine.gpus if goal.gpus is None or gpu.index in goal.gpus]
    return () if goal.cpu_only else tuple(f"gpu{index}" for index in allowed)


def assemble(
    profile: Profile,
    host: str,
    layers: Sequence[str],
    head: str,
    resident: frozenset[int],
    *,
    predicts: bool = False,
) -> Placement:
    """Build a placement from the device of every layer and the layers whose experts live with them.

    `predicts`: layers for multi-token prediction are used; engines put them on the last layer's device.
    """
    used = [*layers]
    if predicts and layers:
        first = len(layers)
        used += [layers[-1]] * len(profile.prediction)
        resident |= frozenset(range(first, len(used))) if first - 1 in resident else frozenset()
    homes = tuple(_home(tensor, host, used, head, resident) for tensor in profile.tensors)
    return Placement(homes, tuple(layers), head)


def _home(tensor: Tensor, host: str, layers: Sequence[str], head: str, resident: frozenset[int]) -> str:
    if tensor.cls is TensorClass.EMBEDDING:
        return host  # looked up by row; engines keep it in host memory
    if tensor.layer is None:
        return head
    if tensor.layer >= len(layers):
        return host  # multi-token prediction layers are not used
    # experts of prediction layers are told by their shape
    if (tensor.cls is EXPERTS or _is_predicting_expert(tensor)) and tensor.layer not in resident:
        return host
    return layers[tensor.layer]


def _is_predicting_expert(tensor: Tensor) -> bool:
    return tensor.cls is TensorClass.MTP and classify(tensor.name, tensor.shape) is EXPERTS


def spill(
    profile: Profile, placement: Placement, host: str, over_bytes: int, tiers: Sequence[tuple[str, int]]
) -> Placement:
    """Move at least `over_bytes` of host experts, whole layers, last first, to `tiers` (name, free bytes)."""
    homes = list(placement.homes)
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(profile.tensors):
        if tensor.cls is EXPERTS and tensor.layer is not None and homes[index] == host:
            groups.setdefault(tensor.layer, []).append(index)
    free = dict(tiers)
    for layer in sorted(groups, reverse=True):
        if over_bytes <= 0:
            break
        size = sum(profile.tensors[index].bytes for index in groups[layer])
        target = next((name for name, left in free.items() if left >= size), None)
        if target is None:
            break
        for index in groups[layer]:
            homes[index] = target
        free[target] -= size
        over_bytes -= size
    return Placement(tuple(homes), placement.layers, placement.head)


UNKNOWN = "plan"
"""Fingerprint of CPU-only placements and of old records without a placement."""

STEP = 10  # percent
_IDLE = (TensorClass.EMBEDDING, TensorClass.MTP)


def fingerprint(profile: Profile, placement: Placement) -> str:
    """A short name shared by similar placements; `UNKNOWN` if no GPU is used."""
    if not placement.gpus:
        return UNKNOWN
    sums: dict[str, Counter[str]] = {"experts": Counter(), "rest": Counter()}
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        if tensor.cls not in _IDLE:
            sums["experts" if tensor.cls is TensorClass.ROUTED_EXPERTS else "rest"][home] += tensor.bytes
    return ", ".join(f"{kind} {_shares(found)}" for kind, found in sums.items() if found)


def kinds(name: str) -> str:
    """A fingerprint without percentages: the memories in use, for comparing different models."""
    return re.sub(r" \d+%", "", name)


def _shares(found: Counter[str]) -> str:
    if len(found) == 1:
        return next(iter(found))
    total = found.total()
    return " ".join(f"{tier} {_rounded(found[tier] / total)}%" for tier in sorted(found))


def _rounded(share: float) -> int:
    """Round to `STEP`, but never to 0 or 100 unless exact."""
    return min(100 - STEP, max(STEP, round(share * 100 / STEP) * STEP))
