"""Capabilities of each device under given settings: memory rates, arithmetic, cost of operations and links.

`devices` is the entry point. Unknown facts are listed in `missing`, never guessed. Independent of models.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenmill.hardware.machine import Gpu, Machine
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.plan import Settings
from tokenmill.planner.speed.calibration import Calibration
from tokenmill.planner.speed.cores import core_kind, core_value, is_shared_guest, is_xeon, relative_clock
from tokenmill.planner.speed.memory_rates import MemoryRate, memory_rate
from tokenmill.planner.speed.rates import RateConstants, card_tflops

CPU = "cpu"  # key of `Devices.missing` for a machine of which no processor is known
BARRIER_THREADS = 16  # number of threads that `cpu_op_s` is the cost of one operation with
DATACENTER = ("8.0", "9.0")  # A100, H100, H200: llama.cpp's kernels reach only a small part of their peak


@dataclass(frozen=True, slots=True)
class Processors:
    """All CPU cores in use together."""

    tier_gb_s: dict[str, float]
    gweights_s: float  # 4-bit weights unpacked per second
    matmul_gflops: float  # for many rows
    attention_pairs_s: float  # query-key pairs per second in decode
    attention_batch: float  # speed-up in prefill
    op_s: float


@dataclass(frozen=True, slots=True)
class CardRates:
    """One GPU."""

    gb_s: float
    dense_tflops: float | None  # for matrix products, as reached by the engine's kernels
    expert_tflops: float | None
    attention_tflops: float | None
    op_s: float  # per operation, launched individually
    graph_op_s: float  # per operation, launched as a CUDA graph
    link_gb_s: float | None  # for copying weights from host memory
    tiled: bool = False  # products of experts with more than a few rows always use tiles


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices that a step can use."""

    decode: Processors  # with the number of decode threads
    prefill: Processors  # with the number of prefill threads
    cards: dict[str, CardRates]
    step_s: float  # the engine's overhead per step
    draw_s: float  # sampling: per sequence and vocabulary entry
    host_hop_s: float
    card_hop_s: float
    measured: frozenset[str]  # tiers whose rate was measured
    missing: dict[str, str]  # tier -> the unknown fact, as a noun phrase
    notes: tuple[str, ...]


def devices(
    machine: Machine,
    settings: Settings,
    rates: RateConstants,
    resident_bytes: Mapping[str, float],
    calibration: Calibration | None = None,
) -> Devices:
    """Collect the capabilities of a machine that holds `resident_bytes` of a model in each tier."""
    known = calibration.tier_gb_s if calibration else {}
    notes: list[str] = []
    missing: dict[str, str] = {}
    memories = {}
    for tier in (tier for tier in machine.tiers() if tier.kind != "vram"):
        memory = memory_rate(machine, tier.name, resident_bytes.get(tier.name, 0.0), rates, notes)
        if tier.name in known:
            memory = MemoryRate(known[tier.name])
        if memory is None:
            missing[tier.name] = f"the bandwidth of {tier.name}"
        else:
            memories[tier.name] = memory
    if machine.cpu.cores is None and not machine.cpu.isa:
        missing[CPU] = "the CPU (cores and isa in the machine file)"
    sides = []
    for threads in (settings.threads, settings.threads_batch):
        alone = rates.core_stream_xeon_gb_s if is_xeon(machine.cpu) else rates.core_stream_gb_s
        stream = alone * min(1.0, (machine.cpu.cores or threads) / max(threads, 1))
        all_cores = _all_cores_factor(machine, threads, rates)
        reached = all_cores * _pool_share(machine, threads)
        tiers = {name: memory.at(threads, stream) * reached for name, memory in memories.items()}
        sides.append(_processors(machine, settings, rates, tiers, threads))
    cards: dict[str, CardRates] = {}
    for gpu in machine.gpus:
        name = f"gpu{gpu.index}"
        card = _card(machine, gpu, settings, rates)
        if card is None:
            missing[name] = f"the memory bandwidth of {gpu.name} ({name})"
        else:
            cards[name] = replace(card, gb_s=known.get(name, card.gb_s))
    measured = {tier.name for tier in machine.tiers() if tier.measured_gb_s is not None} | set(known)
    slow = _guest_delay(machine, rates)
    step_s = rates.vllm_step_s if settings.engine == "vllm" else rates.step_s
    return Devices(
        decode=sides[0],
        prefill=sides[1],
        cards=cards,
        step_s=step_s * slow,
        host_hop_s=rates.host_hop_s * slow,
        # known for the native engine only, which sets output_rows
        draw_s=rates.draw_ns * slow * 1e-9 if settings.output_rows is not None else 0.0,
        card_hop_s=rates.gpu_hop_s,
        measured=frozenset(measured),
        missing=missing,
        notes=tuple(notes),
    )


def _core_share(machine: Machine, threads: int, rates: RateConstants) -> float:
    """Number of cores that the threads are equivalent to.

    Work is split evenly, so a core with two threads delays all others: 1.3 threads per core are slower than 1.
    """
    cores = machine.cpu.cores or threads
    return threads if threads <= cores else min(cores, threads * rates.shared_core)


def _pool_share(machine: Machine, threads: int) -> float:
    """The part of the memory's rate that a pool of fewer threads than cores reaches on several sockets.

    The links between the sockets limit it: with half of the cores, as many threads sit on one socket as on none.
    """
    cores = machine.cpu.cores or threads
    return 1.0 if (machine.cpu.sockets or 1) == 1 else math.sqrt(min(1.0, threads / cores))


def _guest_delay(machine: Machine, rates: RateConstants) -> float:
    """Slowdown of a cloud guest's processor where it waits: for its threads, and for the GPU that it feeds."""
    return 1 / rates.virtual_host if is_shared_guest(machine) else 1.0


def _all_cores_factor(machine: Machine, threads: int, rates: RateConstants) -> float:
    """Slowdown if the threads leave no core to the system, the driver or the hypervisor; 1 otherwise."""
    if threads < (machine.cpu.cores or threads + 1):
        return 1.0
    return rates.all_cores_virtual if is_shared_guest(machine) else rates.all_cores


def _processors(
    machine: Machine, settings: Settings, rates: RateConstants, tiers: dict[str, float], threads: int
) -> Processors:
    cores = (
        _core_share(machine, threads, rates)
        * _all_cores_factor(machine, threads, rates)
        * core_value(machine, rates)
        * relative_clock(machine.cpu, rates)
    )
    ik = TRAITS[settings.engine].ik is not None
    kind = core_kind(machine.cpu)
    unpack = {"baseline": 1.0, "vnni": rates.unpack_vnni, "wide": rates.unpack_wide}[kind]
    matmul = {"baseline": 1.0, "vnni": rates.cpu_matmul_vnni, "wide": rates.cpu_matmul_wide}[kind]
    attending = cores / (1 + threads / rates.cpu_attention_threads)
    return Processors(
        tier_gb_s=tiers,
        gweights_s=cores * rates.unpack_core * unpack * (rates.unpack_ik if ik else 1.0),
        matmul_gflops=cores * rates.cpu_matmul_gflops * matmul * (rates.cpu_matmul_ik if ik else 1.0),
        attention_pairs_s=attending / rates.cpu_attention_ns * 1e9 * (rates.cpu_attention_ik if ik else 1.0),
        attention_batch=rates.cpu_attention_ik_prefill if ik else rates.cpu_attention_prefill,
        op_s=rates.cpu_op_s * (threads / BARRIER_THREADS) ** rates.cpu_op_growth * _guest_delay(machine, rates),
    )


def _card(machine: Machine, gpu: Gpu, settings: Settings, rates: RateConstants) -> CardRates | None:
    measured = machine.measured.gb_s(f"gpu{gpu.index}") if machine.measured else None
    # probe measures a copy, which is close to nominal; weights are read at a lower rate
    bandwidth = gpu.nominal_gb_s if measured is None else measured / rates.gpu_copy_fraction
    if bandwidth is None:
        return None
    nominal = card_tflops(gpu.name) if gpu.tflops is None else gpu.tflops
    vllm = settings.engine == "vllm"
    if nominal is not None and not vllm and gpu.compute_capability in DATACENTER:
        nominal *= rates.datacenter_fraction
    return CardRates(
        gb_s=bandwidth * rates.gpu_fraction,
        dense_tflops=nominal and nominal * (rates.vllm_matmul_fraction if vllm else rates.gpu_dense_fraction),
        expert_tflops=nominal and nominal * (rates.vllm_matmul_fraction if vllm else rates.gpu_matmul_fraction),
        attention_tflops=nominal and nominal * rates.gpu_attention_fraction,
        op_s=rates.gpu_op_s,
        graph_op_s=rates.gpu_graph_op_s,
        link_gb_s=_link(machine, gpu, settings, rates),
        tiled=not vllm and TRAITS[settings.engine].ik is None,
    )


def _link(machine: Machine, gpu: Gpu, settings: Settings, rates: RateConstants) -> float | None:
    """PCIe rate for weights; those of a mapped file are slower because they pass through the driver's buffer."""
    measured = machine.measured.gb_s(f"dram->gpu{gpu.index}") if machine.measured else None
    nominal = gpu.pcie.nominal_gb_s
    pinned = measured if measured is not None else None if nominal is None else nominal * rates.pcie_fraction
    if pinned is None:
        return None
    return min(pinned, rates.pageable_gb_s) if settings.mmap else pinned
