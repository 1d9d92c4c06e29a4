"""What ggml's CUDA backend keeps on a card beside its buffers: a pool that grows to the largest operation's scratch.

Products with quantised weights take what they read in 8-bit blocks, once for every expert that a token goes to; those
with 16-bit weights take it in 16 bits; attention has a cache of any other type than f16 converted first. Operations
take turns, so the largest counts. With the H200's figures the driver's totals come out within 4 MiB at every
micro-batch from 256 to 4096 (docs/validation).
"""

from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.kv_cells import Context
from tokenmill.units import MIB

_PADDED = 512  # values of a row, as the products take them
_BLOCK_BYTES, _BLOCK = 36, 32  # of a block of 8-bit values with its scales
_HALF = 2
_WHOLE = ("F32", "F64")
_HALVES = ("F16", "BF16")

# Driver context, kernels and workspaces, by compute capability: what is left of the driver's figure for the process.
CONTEXT_BYTES = {
    "8.6": 470 * MIB,  # three RTX 3090, ik_llama.cpp, July 2025: see ik_memory
    "9.0": 690 * MIB,  # H200, driver 580, llama.cpp b11549, 2026-11-15
}


def pool_bytes(profile: Profile, context: Context) -> int:
    """Scratch of the largest operation of a full micro-batch."""
    rows = context.largest_ubatch
    used = profile.experts.used if profile.experts is not None else 1
    widest = max((_per_row(tensor, used) for tensor in profile.tensors if tensor.layer is not None), default=0)
    return max(rows * widest, _converted(profile, context))


def _per_row(tensor: Tensor, used: int) -> int:
    """Bytes that a row of a product's input is converted to."""
    if len(tensor.shape) < 2 or tensor.type in _WHOLE:
        return 0
    width = -(-tensor.shape[0] // _PADDED) * _PADDED
    matrices = tensor.shape[2] if len(tensor.shape) > 2 else 1  # experts, or heads that have one each
    times = used if tensor.cls is TensorClass.ROUTED_EXPERTS else matrices
    return width * times * _HALF if tensor.type in _HALVES else width * times * _BLOCK_BYTES // _BLOCK


def _converted(profile: Profile, context: Context) -> int:
    """One layer's cache in 16 bits, where it is kept in others."""
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
