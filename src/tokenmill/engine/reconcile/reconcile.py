"""Compares a plan's ledger with the measured memory of a loaded engine, item by item. Entry point: `reconcile`.

  source        items
  engine        weights, repack, kv, compute, output: its own buffers, from its log or llama.cpp's breakdown
  process       mapped (pages of the model file), own (all other resident memory), prompt_cache
  driver        total and runtime of each GPU: memory of the engine's processes

Pure. Items without a prediction or a measurement are not compared. A difference is flagged if it exceeds `TOLERANCE` of
the measured size and `FLOOR_BYTES`, with its likely cause if it is known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.loading.process import ProcessMemory
from tokenmill.engine.logs.ik_llama import SPLIT
from tokenmill.engine.logs.parsed import EngineLog, RequestedContext
from tokenmill.engine.reconcile.reconcile_why import predict_compute, why_engine, why_process
from tokenmill.launch.binding import HOST_TIERS
from tokenmill.launch.dialect import device_names
from tokenmill.model.profile import TensorClass
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.memory.drafting import loads_prediction
from tokenmill.planner.memory.kv_cells import context_of, output_bytes
from tokenmill.planner.memory.weights import WHEEL_ISA, is_repacked
from tokenmill.planner.plan import Item, Plan
from tokenmill.units import MIB

TOLERANCE = 0.05
FLOOR_BYTES = 16 * MIB  # logs round to hundredths of GiB, and allocators to pages of a few MiB
HOST = "host"
GPUS = "gpus"

MeasuredBy = Literal["engine", "process", "driver"]
RowItem = Literal["weights", "repack", "kv", "compute", "output", "mapped", "own", "prompt_cache", "total", "runtime"]
_ENGINE_ITEMS: dict[RowItem, tuple[Item, ...]] = {
    "weights": ("weights",),
    "repack": ("repack",),
    "kv": ("kv",),
    "compute": ("compute", "staging"),
}


@dataclass(frozen=True, slots=True)
class ObservedMemory:
    """Measured memory of a running engine; None: unknown."""

    buffers: tuple[Buffer, ...] = ()
    mapped: bool | None = None
    output_bytes: int | None = None
    prompt_cache_bytes: int | None = None
    requested: RequestedContext = field(default_factory=RequestedContext)
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    vram_bytes: Mapping[int, int] | None = None  # of the engine's processes, by GPU index
    build: str | None = None


@dataclass(frozen=True, slots=True)
class ReconciledItem:
    """One item in one memory, predicted and measured."""

    tier: str  # gpu0, ...; host: all memory except GPUs; gpus: the sum of all GPUs
    item: RowItem
    predicted_bytes: int
    measured_bytes: int | None
    source: MeasuredBy
    as_asked_bytes: int | None = None  # prediction for the context settings in the engine's log
    explanation: str | None = None  # likely cause of a flagged difference

    @property
    def difference_bytes(self) -> int | None:
        """Predicted minus measured; negative if the prediction is too low."""
        return None if self.measured_bytes is None else self.predicted_bytes - self.measured_bytes

    @property
    def share(self) -> float | None:
        """The difference as a share of the measured size."""
        difference = self.difference_bytes
        return difference / self.measured_bytes if self.measured_bytes and difference is not None else None

    @property
    def flagged(self) -> bool:
        """Whether the difference exceeds the tolerance."""
        return self.measured_bytes is not None and differs(self.predicted_bytes, self.measured_bytes)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Result of the comparison."""

    rows: tuple[ReconciledItem, ...]
    build: str | None = None

    @property
    def flagged(self) -> tuple[ReconciledItem, ...]:
        """Flagged rows, the largest difference first."""
        rows = [row for row in self.rows if row.flagged]
        return tuple(sorted(rows, key=lambda row: -abs(row.difference_bytes or 0)))


def differs(predicted_bytes: int, measured_bytes: int) -> bool:
    """Whether the difference exceeds the tolerance."""
    return abs(predicted_bytes - measured_bytes) > max(TOLERANCE * measured_bytes, FLOOR_BYTES)


def observed(
    log: EngineLog, *, memory: ProcessMemory | None = None, vram_bytes: Mapping[int, int] | None = None
) -> ObservedMemory:
    """Combine an engine's log with the memory of its processes."""
    return ObservedMemory(
        log.buffers,
        log.mapped,
        log.output_bytes,
        log.prompt_cache_bytes,
        log.requested,
        memory or ProcessMemory(),
        vram_bytes,
        log.build,
    )


def reconcile(plan: Plan, seen: ObservedMemory) -> Reconciliation:
    """Compare a plan with the measurements after its load."""
    rows = (*_engine_rows(plan, seen), *_process_rows(plan, seen), *_driver_rows(plan, seen))
    return Reconciliation(rows, seen.build)


def _engine_rows(plan: Plan, seen: ObservedMemory) -> Iterator[ReconciledItem]:
    if not seen.buffers:
        return
    for tier, buffers in _by_tier(plan, seen).items():
        mapped = _is_mapped(plan, seen)
        for item, measured in _measured(buffers, mapped=mapped).items():
            predicted = _predicted(plan, tier, item)
            if mapped and plan.settings.mmap and (tier, item) == (HOST, "weights"):
                predicted = spanned_bytes(plan) or predicted
            if not predicted and (plan.settings.engine == "vllm" or not measured):
                continue  # the plan has only one estimate for the rest of vLLM's memory: runtime
            if plan.settings.engine == "vllm" and not measured:
                yield ReconciledItem(tier, item, predicted, None, "engine")  # not in its log on CPUs
                continue
            as_requested = predict_compute(plan, tier, seen.requested) if item == "compute" else None
            why = why_engine(plan, tier, item, seen.requested, as_requested, predicted, measured, mapped=seen.mapped)
            explanation = why if differs(predicted, measured) else None
            yield ReconciledItem(tier, item, predicted, measured, "engine", as_requested, explanation)
    if seen.output_bytes is not None:
        predicted = output_bytes(plan.profile, context_of(plan.settings))
        yield ReconciledItem(HOST, "output", predicted, seen.output_bytes, "engine")


def _by_tier(plan: Plan, seen: ObservedMemory) -> dict[str, list[Buffer]]:
    """Buffers by tier; all GPUs count as one tier if a buffer is split between them."""
    tiers = {name: tier for tier, name in device_names(plan).items()}
    together = any(buffer.name == SPLIT for buffer in seen.buffers)
    found: dict[str, list[Buffer]] = {HOST: []}
    for tier in () if together else plan.placement.gpus:
        found[tier] = []
    for buffer in seen.buffers:
        on_gpu = buffer.gpu is not None or buffer.name == SPLIT
        tier = GPUS if together and on_gpu else tiers.get(buffer.name, buffer.name if on_gpu else HOST)
        found.setdefault(tier, []).append(buffer)
    return found


def _measured(buffers: list[Buffer], *, mapped: bool) -> dict[RowItem, int]:
    """Sizes by item. Repacked weights are a copy if the file is mapped, otherwise they replace the weights."""
    repacked = sum(buffer.model_bytes for buffer in buffers if is_repack_buffer(buffer))
    model = sum(buffer.model_bytes for buffer in buffers)
    return {
        "weights": model - repacked if mapped else model,
        "repack": repacked if mapped else 0,
        "kv": sum(buffer.context_bytes for buffer in buffers),
        "compute": sum(buffer.compute_bytes for buffer in buffers),
    }


def is_repack_buffer(buffer: Buffer) -> bool:
    """Whether a buffer contains weights repacked for the CPU's instructions."""
    return buffer.name in ("CPU_REPACK", "CPU_AARCH64", "AMX")


def _is_mapped(plan: Plan, seen: ObservedMemory) -> bool:
    if seen.mapped is not None:
        return seen.mapped
    return plan.settings.mmap and plan.settings.engine != "vllm"


def _predicted(plan: Plan, tier: str, item: RowItem) -> int:
    rows = plan.ledger.after_load
    return sum(row.bytes for row in rows if row.item in _ENGINE_ITEMS[item] and in_tier(row.tier, tier))


def spanned_bytes(plan: Plan) -> int | None:
    """Size of the mapped buffers: in each file, from the first to the last host tensor. None: no file was read.

    The range may contain tensors that were copied to a GPU or repacked. The kernel can evict their pages, so the ledger
    does not count them, but they are part of the process's resident memory.
    """
    isa = plan.machine.cpu.isa or tuple(WHEEL_ISA)
    repacks = plan.settings.repack and TRAITS[plan.settings.engine].repacks
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    if len({(tensor.file, tensor.offset) for tensor in plan.profile.tensors}) < len(plan.profile.tensors):
        return None
    for tensor, home in zip(plan.profile.tensors, plan.placement.homes, strict=True):
        if home not in HOST_TIERS or (tensor.cls is TensorClass.MTP and not loads_prediction(plan.settings)):
            continue
        if (
            repacks
            and plan.placement.device_of(tensor) in HOST_TIERS
            and is_repacked(tensor, isa, mtp=plan.settings.mtp)
        ):
            continue
        first[tensor.file] = min(tensor.offset, first.get(tensor.file, tensor.offset))
        last[tensor.file] = max(tensor.offset + tensor.bytes, last.get(tensor.file, 0))
    return sum(last[file] - first[file] for file in first)


def in_tier(name: str, tier: str) -> bool:
    """Whether a tier of the ledger is part of the tier of a row."""
    if tier == HOST:
        return name in HOST_TIERS
    return name.startswith("gpu") if tier == GPUS else name == tier


def _process_rows(plan: Plan, seen: ObservedMemory) -> Iterator[ReconciledItem]:
    memory = seen.memory
    mapped = _is_mapped(plan, seen)
    rows = [row for row in plan.ledger.after_load if row.tier in HOST_TIERS and row.item != "reserve"]
    weights = sum(row.bytes for row in rows if row.item == "weights")
    pages = max(weights, (spanned_bytes(plan) if plan.settings.mmap else None) or 0) if mapped else 0
    if mapped and pages and memory.file_bytes is not None:
        why = why_process("mapped", plan, pages, memory.file_bytes, seen.buffers)
        yield ReconciledItem(
            HOST, "mapped", pages, memory.file_bytes, "process", None, _if_differs(pages, memory.file_bytes, why)
        )
    if (
        memory.anon_bytes is not None and not plan.placement.gpus
    ):  # memory pinned by the driver is not counted as resident
        measured = memory.anon_bytes + (memory.swap_bytes or 0)
        own = sum(row.bytes for row in rows) - (weights if mapped else 0)
        why = why_process("own", plan, own, measured, seen.buffers)
        yield ReconciledItem(HOST, "own", own, measured, "process", None, _if_differs(own, measured, why))
    cache = sum(row.bytes for row in rows if row.item == "prompt_cache")
    if cache and seen.prompt_cache_bytes is not None:
        why = why_process("prompt_cache", plan, cache, seen.prompt_cache_bytes, seen.buffers)
        yield ReconciledItem(
            HOST,
            "prompt_cache",
            cache,
            seen.prompt_cache_bytes,
            "process",
            None,
            _if_differs(cache, seen.prompt_cache_bytes, why),
        )


def _driver_rows(plan: Plan, seen: ObservedMemory) -> Iterator[ReconciledItem]:
    if seen.vram_bytes is None:
        return
    buffers = _by_tier(plan, seen)
    for tier in plan.placement.gpus:
        measured = seen.vram_bytes.get(int(tier[3:]))
        rows = [row for row in plan.ledger.after_load if row.tier == tier and row.item != "reserve"]
        total = sum(row.bytes for row in rows)
        yield ReconciledItem(tier, "total", total, measured, "driver")
        mine = buffers.get(tier, [])
        runtime = sum(row.bytes for row in rows if row.item == "runtime")
        if measured is not None and mine:
            held = sum(buffer.model_bytes + buffer.context_bytes + buffer.compute_bytes for buffer in mine)
            rest = max(0, measured - held)
            why = "driver context, kernels and workspaces, which the plan only estimates"
            yield ReconciledItem(tier, "runtime", runtime, rest, "driver", None, _if_differs(runtime, rest, why))


def _if_differs(predicted: int, measured: int, why: str | None) -> str | None:
    return why if differs(predicted, measured) else None
