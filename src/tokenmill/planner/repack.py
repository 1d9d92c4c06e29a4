"""Which weights llama.cpp's processor backend keeps in a layout of its own, interleaved for vector instructions.

They are rewritten while the model loads: where the file is mapped, its pages stay beside them. What is rewritten
depends on the instructions that llama.cpp was *built* for, which in a wheel is less than the processor has.
From ggml/src/ggml-cpu/repack.cpp of b11549; AMX builds have a buffer of their own and are not known here.
"""

from collections.abc import Collection

from tokenmill.model.profile import Tensor, TensorClass

WHEEL_ISA = frozenset({"avx2", "fma", "f16c"})
"""What the x86-64 xllamacpp wheel is built for."""

_AVX2 = frozenset({"avx2"})
_AVX512 = frozenset({"avx512f"})
_DOT = frozenset({"neon", "dotprod"})
_I8MM = frozenset({"neon", "i8mm"})
# Type -> (instructions that suffice, what the number of rows must be a multiple of).
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
    """Whether a matrix of this type and shape is rewritten by a build for these instructions."""
    if len(shape) < 2:
        return False
    kernels = _KERNELS.get(tensor_type.upper(), ())
    return any(needs <= frozenset(isa) and shape[1] % rows == 0 for needs, rows in kernels)


def is_repacked(tensor: Tensor, isa: Collection[str] = WHEEL_ISA) -> bool:
    """Whether this tensor of a model is rewritten: a matrix that is multiplied with, or a stack of experts.

    Multi-token prediction layers are not: llama.cpp leaves them on the disk unless it is told to use them.
    """
    unused = tensor.cls in (TensorClass.EMBEDDING, TensorClass.NORM, TensorClass.MTP)
    stacked = len(tensor.shape) == 3 and tensor.cls is not TensorClass.ROUTED_EXPERTS
    return not unused and not stacked and repacked(tensor.type, tensor.shape, isa)
