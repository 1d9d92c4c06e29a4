"""Weights that llama.cpp's CPU backend repacks while loading, and scratch memory of products with weights.

Repacked weights are interleaved for vector instructions; with mmap the file's pages remain in memory as well. Which
weights are repacked depends on the instructions that llama.cpp was *built* for, in a wheel fewer than the CPU has.
Source: ggml/src/ggml-cpu/repack.cpp of b11549. AMX builds use a separate buffer and are not covered.
"""

from collections.abc import Collection

from tokenmill.model.architectures import classify
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.memory.kv_cells import KvContext
from tokenmill.units import MIB

WHEEL_ISA = frozenset({"avx2", "fma", "f16c"})
"""Instruction sets that the x86-64 xllamacpp wheel is built for."""

_AVX2 = frozenset({"avx2"})
_AVX512 = frozenset({"avx512f"})
_DOT = frozenset({"neon", "dotprod"})
_I8MM = frozenset({"neon", "i8mm"})
# type -> alternatives of (required instructions, divisor of the number of rows)
_KERNELS: dict[str, tuple[tuple[frozenset[str], int], ...]] = {
    "Q4_0": ((_AVX2, 8), (_I8MM, 4), (_DOT, 4)),
    "Q4_K": ((_AVX2, 8), (_I8MM, 8), (_DOT, 8)),
    "Q2_K": ((_AVX512, 8),),
    "Q5_K": ((_I8MM, 8), (_DOT, 8)),
    "Q6_K": ((_I8MM, 8), (_DOT, 8)),
    "IQ4_NL": ((_AVX2, 8), (_DOT, 4)),
    "MXFP4": ((_AVX2, 8), (_DOT, 4)),
    "Q8_0": ((_I8MM, 4), (_DOT, 4)),
}


def repacked(tensor_type: str, shape: tuple[int, ...], isa: Collection[str] = WHEEL_ISA) -> bool:
    """Whether a build for these instructions repacks a matrix of this type and shape."""
    if len(shape) < 2:
        return False
    kernels = _KERNELS.get(tensor_type.upper(), ())
    return any(needs <= frozenset(isa) and shape[1] % rows == 0 for needs, rows in kernels)


def is_repacked(tensor: Tensor, isa: Collection[str] = WHEEL_ISA, *, mtp: bool = False) -> bool:
    """Whether this tensor is repacked, which applies to matrices of products and stacks of experts.

    Multi-token prediction layers are repacked only with `mtp`, because llama.cpp leaves them on disk by default.
    """
    cls = tensor.cls
    if mtp and cls is TensorClass.MTP and not tensor.name.endswith("nextn.embed_tokens.weight"):
        cls = classify(tensor.name, tensor.shape)
        cls = TensorClass.DENSE_FFN if cls is TensorClass.MTP else cls
    unused = cls in (TensorClass.EMBEDDING, TensorClass.NORM, TensorClass.MTP)
    stacked = len(tensor.shape) == 3 and cls is not TensorClass.ROUTED_EXPERTS
    return not unused and not stacked and repacked(tensor.type, tensor.shape, isa)


_PADDED = 512  # values per row, as the kernels read them
_BLOCK_BYTES, _BLOCK = 36, 32  # bytes and values of an 8-bit block with its scales
_HALF = 2
_WHOLE = ("F32", "F64")
_HALVES = ("F16", "BF16")

# Driver context, kernels and workspaces by compute capability: memory of the process minus all computed items.
CONTEXT_BYTES = {
    "8.6": 470 * MIB,  # three RTX 3090, ik_llama.cpp, July 2025: see ik_memory
    "9.0": 690 * MIB,  # H200, driver 580, llama.cpp b11549, 2026-11-15
}


def pool_bytes(profile: Profile, context: KvContext) -> int:
    """Scratch bytes of the largest operation of a full micro-batch."""
    rows = context.largest_ubatch
    used = profile.experts.used if profile.experts is not None else 1
    widest = max((_per_row(tensor, used) for tensor in profile.tensors if tensor.layer is not None), default=0)
    return max(rows * widest, _converted(profile, context))


def _per_row(tensor: Tensor, used: int) -> int:
    """Bytes of one row of a product's input after conversion."""
    if len(tensor.shape) < 2 or tensor.type in _WHOLE:
        return 0
    width = -(-tensor.shape[0] // _PADDED) * _PADDED
    matrices = tensor.shape[2] if len(tensor.shape) > 2 else 1  # experts, or attention heads with one matrix each
    times = used if tensor.cls is TensorClass.ROUTED_EXPERTS else matrices
    return width * times * _HALF if tensor.type in _HALVES else width * times * _BLOCK_BYTES // _BLOCK


def _converted(profile: Profile, context: KvContext) -> int:
    """Bytes of one layer's cache converted to 16 bits; 0 if it already is."""
    if not context.flash_attention:
        return 0
    type_k = context.type_k.lower()
    type_v = context.type_v.lower()
    return max(
        (
            context.size
            * _HALF
            * ((type_k != "f16") * cache.k_elements + (type_v != "f16" and cache.kind != "latent") * cache.v_elements)
            for cache in profile.cache
            if cache.kind not in ("recurrent", "none")
        ),
        default=0,
    )
