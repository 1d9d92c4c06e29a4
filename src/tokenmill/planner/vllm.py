"""vLLM's memory. At start vLLM reserves a share of every GPU; KV gets the rest after weights and activations.

Therefore the plan computes the number of KV tokens that fit, not the memory that a context needs. Without GPUs vLLM
runs on the CPU with an explicit KV size, computed from the context.
"""

from dataclasses import dataclass

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.goal import Goal
from tokenmill.planner.placement import assemble, host_tier, os_reserve, usable_gpus
from tokenmill.planner.plan import Ledger, LedgerRow, Placement, Settings
from tokenmill.units import GIB, MIB

BLOCK = 16  # tokens per KV block
ACTIVATION_BYTES = 1024 * MIB  # driver, profiling run, sampler, graph pools: estimated from one published log
HOST_BYTES = 6 * GIB  # the Python processes and their pinned buffers: estimated
CPU_BLOCK = 32  # tokens per KV block on the CPU
CPU_HOST_BYTES = 2304 * MIB  # three Python processes of 0.32.0: 2.2 GiB measured, 1.5 where Triton is not installed


@dataclass(frozen=True, slots=True)
class Blocks:
    """The KV space of one engine."""

    kv_bytes: int  # per GPU
    tokens: int  # total of all sequences


def bytes_per_token(profile: Profile, settings: Settings) -> float:
    """KV bytes of one token in all layers; sliding windows and chunks keep the full context."""
    kind = "fp8" if settings.cache_type_k.startswith("fp8") else "f16"
    return sum(layer.bytes_per_token(kind, kind) for layer in profile.cache)


def blocks(profile: Profile, settings: Settings, vram_bytes: int) -> Blocks:
    """KV space on GPUs of this size."""
    shards = settings.tensor_parallel
    budget = int(settings.gpu_memory_utilization * vram_bytes)
    left = max(0, budget - -(-profile.bytes // shards) - ACTIVATION_BYTES)
    per_block = bytes_per_token(profile, settings) * BLOCK / _kv_shards(profile, shards)
    return Blocks(left, int(left // per_block) * BLOCK if per_block else 0)


def place(machine: Machine, profile: Profile, settings: Settings, goal: Goal) -> tuple[Placement, Ledger, int]:
    """Place the model on the first GPUs; return placement, ledger and KV tokens that fit."""
    gpus = usable_gpus(machine, goal)[: settings.tensor_parallel]
    if not gpus:
        return _on_processors(machine, profile, settings, goal)
    host = host_tier(machine)
    home = gpus[0]
    placement = assemble(profile, host, [home] * profile.layers, home, frozenset(range(profile.layers)))
    # unlike the other engines, vLLM keeps embeddings on the GPU
    homes = tuple(
        home if tensor.cls is TensorClass.EMBEDDING else old
        for tensor, old in zip(profile.tensors, placement.homes, strict=True)
    )
    placement = Placement(homes, placement.layers, placement.head)
    sizes = {gpu.index: gpu.vram_bytes or 0 for gpu in machine.gpus}
    rows: list[LedgerRow] = []
    tokens = 0
    for gpu in gpus:
        found = blocks(profile, settings, sizes[int(gpu[3:])])
        tokens = found.tokens if gpu == gpus[0] else min(tokens, found.tokens)
        rows += [
            LedgerRow(gpu, "weights", -(-profile.bytes // settings.tensor_parallel)),
            LedgerRow(gpu, "kv", found.kv_bytes),
            LedgerRow(gpu, "runtime", ACTIVATION_BYTES),
        ]
    rows += [
        LedgerRow(host, "runtime", HOST_BYTES),
        LedgerRow(host, "reserve", os_reserve(machine) + goal.reserve_ram_bytes),
    ]
    return placement, Ledger(tuple(rows), tuple(rows), tuple(rows)), tokens


def _on_processors(machine: Machine, profile: Profile, settings: Settings, goal: Goal) -> tuple[Placement, Ledger, int]:
    """Place the model in host memory, with KV for every sequence at full context."""
    host = host_tier(machine)
    placement = assemble(profile, host, [host] * profile.layers, host, frozenset())
    tokens = settings.sequences * -(-settings.context // CPU_BLOCK) * CPU_BLOCK
    kv_bytes = round(bytes_per_token(profile, settings) * (tokens + CPU_BLOCK))  # vLLM reserves one block for itself
    rows = (
        LedgerRow(host, "weights", profile.bytes),
        LedgerRow(host, "kv", kv_bytes),
        LedgerRow(host, "runtime", CPU_HOST_BYTES),
        LedgerRow(host, "reserve", os_reserve(machine) + goal.reserve_ram_bytes),
    )
    return placement, Ledger(rows, rows, rows), tokens


def _kv_shards(profile: Profile, shards: int) -> int:
    """Number of GPUs over which KV heads are divided; a latent cache is replicated on every GPU."""
    if any(layer.kind == "latent" for layer in profile.cache):
        return 1
    return min(shards, profile.kv_heads or shards)
