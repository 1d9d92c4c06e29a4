"""How a model is loaded and a context is made, and how that is written into llama.cpp's parameter structures.

Imports no numpy and opens no library, so that a plan can be turned into settings without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.config import MAX_THREADS
from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError, UsageError
from tokenmill.native.llama.library import Library

LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}  # (mmap, mlock)
LOAD_MODE_NONE = LOAD_MODES[False, False]  # read the file into buffers, do not map it
GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""Cache types by ggml's numbers."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is loaded."""

    gpus: tuple[int, ...] = ()  # GPUs in use; the process sees only these, numbered from 0
    gpu_layers: int = 0  # counted from the last layer; the output counts as one more
    tensor_split: tuple[float, ...] = ()  # share of each GPU
    overrides: tuple[tuple[str, str], ...] = ()  # tensor name pattern -> device: CPU, GPU0, ...
    mmap: bool = True
    mlock: bool = False
    repack: bool = True


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How a context is made."""

    cells: int  # of all sequences
    context: int  # maximum tokens per sequence; the scheduler enforces it
    sequences: int = 8  # ids 0 to sequences - 1; each costs one row of logits
    ubatch: int = 512
    batch: int = 2048
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    threads: int = 4
    threads_batch: int = 4
    moe_cache_bytes: int = 0
    op_offload: bool = True
    streams: bool = False  # each sequence has cells / sequences of its own: see kv/streams.py
    lockstep: bool = False  # with streams: every pass over the weights is expensive, see lockstep.py

    def __post_init__(self) -> None:
        for name in ("threads", "threads_batch"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_THREADS:
                raise UsageError(
                    f"{name} must be 1-{MAX_THREADS} (got {value})", hint="use the number of physical cores"
                )


def place(
    library: Library,
    params: Any,
    *,
    gpu_layers: int,
    tensor_split: Sequence[float],
    overrides: Sequence[tuple[str, str]],
) -> list[Any]:
    """Write a placement into a model's parameters; keep the returned objects alive until the model is loaded."""
    ffi = library.ffi
    lib = library.lib
    kept: list[Any] = []
    params.n_gpu_layers = gpu_layers
    if tensor_split:
        shares = list(tensor_split) + [0.0] * (int(lib.llama_max_devices()) - len(tensor_split))
        kept.append(ffi.new("float[]", shares))
        params.tensor_split = kept[-1]
    if overrides:
        table = ffi.new("struct llama_model_tensor_buft_override[]", len(overrides) + 1)  # NULL ends it
        for row, (pattern, name) in zip(table, overrides, strict=False):
            kept.append(ffi.new("char[]", pattern.encode()))
            row.pattern = kept[-1]
            row.buft = lib.ggml_backend_dev_buffer_type(device(library, name))
        kept.append(table)
        params.tensor_buft_overrides = table
    return kept


def device(library: Library, name: str) -> Any:
    """The device CPU, or GPU0, which the backend calls CUDA0, ROCm0 or Vulkan0."""
    devices = library.devices()
    for own, found in devices.items():
        number = Buffer(own).gpu
        if name == (own if number is None else f"GPU{number}"):
            return found
    raise EngineError(f"this llama.cpp has no {name}", hint=f"it has {', '.join(devices)}")


def require_gpu(library: Library) -> None:
    """EngineError unless the library has a GPU: it would silently compute everything on the CPU."""
    devices = library.devices()
    if not any(Buffer(name).gpu is not None for name in devices):
        raise EngineError(
            f"the plan places layers on GPUs, but {library.path} has only {', '.join(devices) or 'no devices'}",
            hint="tokenmill engines build --cuda builds a library for NVIDIA GPUs; --cpu-only plans without GPUs",
            code="gpu_not_supported",
        )


def cache_type(name: str) -> int:
    """The number that ggml gives a cache type."""
    if name.lower() not in GGML_TYPES:
        raise EngineError(f"llama.cpp has no cache type {name}", hint=f"it has {', '.join(sorted(GGML_TYPES))}")
    return GGML_TYPES[name.lower()]
