"""A model's placement as llama.cpp's parameters: shared by the dry run and the real load."""

from collections.abc import Sequence
from typing import Any

from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError
from tokenmill.native import abi


def place(
    library: abi.Library,
    params: Any,
    *,
    repack: bool,
    gpu_layers: int,
    tensor_split: Sequence[float],
    overrides: Sequence[tuple[str, str]],
) -> list[Any]:
    """Write a placement into a model's parameters; what is returned must live until the model is loaded."""
    ffi = library.ffi
    lib = library.lib
    kept: list[Any] = []
    params.use_extra_bufts = repack
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


def device(library: abi.Library, name: str) -> Any:
    """CPU, or GPU0 for what the backend calls CUDA0, ROCm0 or Vulkan0."""
    devices = library.devices()
    for own, found in devices.items():
        number = Buffer(own).gpu
        if name == (own if number is None else f"GPU{number}"):
            return found
    raise EngineError(f"this llama.cpp has no {name}", hint=f"it has {', '.join(devices)}")


def cache_type(name: str) -> int:
    """ggml's number of a cache type."""
    if name.lower() not in abi.GGML_TYPES:
        raise EngineError(f"llama.cpp has no cache type {name}", hint=f"it has {', '.join(sorted(abi.GGML_TYPES))}")
    return abi.GGML_TYPES[name.lower()]
