"""Chooses GGML_OP_OFFLOAD_MIN_BATCH: the batch size from which llama.cpp computes products with host experts on a GPU.

The experts are then copied over PCIe in every step. That speeds up prefill, but decode, where each sequence is one row,
only sometimes: from a mapped file, 32 sequences were measured five times slower than 16, but from pinned memory and
with hundreds of sequences the GPU is faster than the CPU. The forecast covers both cases. The engine reads the variable
at start and applies it to prefill and decode.
"""

from dataclasses import dataclass, replace

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.forecast import decode_speed

MIN_ROWS = 128  # lower bound of the chosen value, so that a few more sequences do not reach it
MIN_SPEEDUP = 1.2  # decode uses the GPU if its forecast is faster than the CPU's by this factor
_NEVER = 1 << 30  # more than any batch


@dataclass(frozen=True, slots=True)
class OffloadSpeeds:
    """Predicted decode speed of all sequences together."""

    gpu_tok_s: float  # host experts are copied to the GPU in every step
    cpu_tok_s: float  # the CPU computes host experts

    @property
    def pays(self) -> bool:
        """Whether the GPU is faster by more than the forecast's error."""
        return self.gpu_tok_s > MIN_SPEEDUP * self.cpu_tok_s


def choose_min_batch(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement, asked: int | None = None
) -> int | None:
    """Choose the variable's value for a plan; None leaves it unset, also if the engine never offloads.

    A requested value (`asked`) is kept. Otherwise the variable is set only if decoding all sequences would reach the
    engine's default. If the GPU would then be slower, or its speed is unknown, the value exceeds the number of
    sequences. If it would be faster, the value only keeps those smaller batches on the CPU that are faster there.
    """
    default = _engine_default(profile, settings, placement)
    if default is None or asked is not None:
        return None if default is None else asked
    if settings.sequences < default:
        return None
    found = compare_offload(machine, profile, settings, placement)
    if found is None or not found.pays:
        return max(MIN_ROWS, 1 << settings.sequences.bit_length())
    rows = default
    while rows < settings.sequences and not _as_fast(
        compare_offload(machine, profile, replace(settings, sequences=rows), placement)
    ):
        rows *= 2
    return None if rows == default else min(rows, settings.sequences)


def _as_fast(found: OffloadSpeeds | None) -> bool:
    return found is not None and found.gpu_tok_s >= found.cpu_tok_s


def compare_offload(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement
) -> OffloadSpeeds | None:
    """Both predicted speeds; None if the engine never offloads or a fact is unknown."""
    if _engine_default(profile, settings, placement) is None:
        return None
    gpu, cpu = (
        decode_speed(
            machine,
            profile,
            settings,
            placement,
            depth=settings.context // 2,
            sequences=settings.sequences,
            min_batch=rows,
        )
        for rows in (1, _NEVER)
    )
    return None if gpu is None or cpu is None else OffloadSpeeds(gpu.tok_s, cpu.tok_s)


def offloaded_decode(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement
) -> OffloadSpeeds | None:
    """Both speeds if decoding copies host experts to the GPUs under these settings and gets faster by it, else None."""
    rows = effective_min_batch(profile, settings, placement)
    if rows is None or settings.sequences < rows:
        return None
    found = compare_offload(machine, profile, settings, placement)
    return found if found is not None and found.pays else None


def effective_min_batch(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The batch size from which an engine with these settings offloads; None: never."""
    default = _engine_default(profile, settings, placement)
    return default if default is None or settings.offload_min_batch is None else settings.offload_min_batch


def _engine_default(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The engine's default; None if it has no such variable or no GPU computes with host experts."""
    traits = TRAITS[settings.engine]
    if traits.ik is not None or not placement.gpus:
        return None
    homes = zip(profile.tensors, placement.homes, strict=True)
    on_host = any(tensor.cls is TensorClass.ROUTED_EXPERTS and not home.startswith("gpu") for tensor, home in homes)
    return traits.offload_rows if on_host else None
