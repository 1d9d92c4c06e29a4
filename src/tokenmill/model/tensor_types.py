"""Tensor types: elements and bytes per block.

A test verifies that mainline types equal those of the `gguf` package, whose import takes a quarter of a second.
ik_llama.cpp's additional types, some with a few bytes per row, come from its `ggml.c` and gguf constants (June 2026).
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type."""

    name: str
    block: int  # elements per block
    block_bytes: int
    row_bytes: int = 0  # additional bytes per row
    ik: bool = False  # ik_llama.cpp only

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor. Raises `ValueError` if a row is not a whole number of blocks."""
        if shape[0] % self.block:
            raise ValueError(f"a row of {shape[0]} is not a multiple of {self.name}'s block of {self.block}")
        return (shape[0] // self.block * self.block_bytes + self.row_bytes) * prod(shape[1:])


_MAINLINE = (  # (number, name, elements per block, bytes per block)
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

_IK = (  # (number, name, elements per block, bytes per block, bytes per row)
    (133, "Q6_0", 32, 26, 0),
    (134, "IQ1_BN", 64, 13, 2),
    (135, "IQ2_BN", 64, 16, 4),
    (137, "IQ2_K", 256, 76, 0),
    (138, "IQ3_K", 256, 110, 0),
    (139, "IQ4_K", 256, 144, 0),
    (140, "IQ5_K", 256, 176, 0),
    (141, "IQ6_K", 256, 212, 0),
    (144, "IQ4_KS", 256, 136, 4),
    (145, "IQ2_KS", 256, 70, 2),
    (146, "IQ4_KSS", 256, 128, 4),
    (151, "Q8_KV", 32, 32, 8),
    (152, "IQ5_KS", 256, 168, 4),
    (153, "IQ2_KT", 256, 68, 4),
    (154, "IQ3_KT", 256, 100, 4),
    (155, "IQ4_KT", 256, 128, 4),
    (156, "IQ3_KS", 256, 102, 2),
    (157, "IQ2_KL", 256, 86, 2),
    (158, "IQ1_KT", 256, 56, 4),
    (202, "Q4_0_R8", 32, 18, 0),
    (206, "Q5_0_R4", 32, 22, 0),
    (208, "Q8_0_R8", 32, 34, 0),
    (210, "Q2_K_R4", 256, 84, 0),
    (211, "Q3_K_R4", 256, 110, 0),
    (212, "Q4_K_R4", 256, 144, 0),
    (213, "Q5_K_R4", 256, 176, 0),
    (214, "Q6_K_R4", 256, 210, 0),
    (216, "IQ2_XXS_R4", 256, 66, 0),
    (217, "IQ2_XS_R4", 256, 74, 0),
    (218, "IQ3_XXS_R4", 256, 98, 0),
    (219, "IQ1_S_R4", 32, 6, 2),
    (220, "IQ4_NL_R4", 32, 18, 0),
    (221, "IQ3_S_R4", 256, 110, 0),
    (222, "IQ2_S_R4", 256, 82, 0),
    (223, "IQ4_XS_R8", 256, 136, 0),
    (229, "IQ1_M_R4", 32, 7, 2),
    (230, "BF16_R16", 1, 2, 0),
    (233, "Q6_0_R4", 32, 26, 0),
    (335, "IQ2_BN_R4", 64, 16, 4),
    (337, "IQ2_K_R4", 256, 76, 0),
    (338, "IQ3_K_R4", 256, 110, 0),
    (339, "IQ4_K_R4", 256, 144, 0),
    (340, "IQ5_K_R4", 256, 176, 0),
    (344, "IQ4_KS_R4", 256, 136, 4),
    (352, "IQ5_KS_R4", 256, 168, 4),
    (398, "Q8_KV_R8", 32, 32, 4),
    (399, "Q8_K_R8", 256, 258, 0),
)

BY_NUMBER: dict[int, BlockType] = {number: BlockType(name, block, size) for number, name, block, size in _MAINLINE} | {
    number: BlockType(name, block, size, row, ik=True) for number, name, block, size, row in _IK
}

BY_NAME: dict[str, BlockType] = {kind.name: kind for kind in BY_NUMBER.values()}

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8")
"""Types of K and V caches; only ik_llama.cpp has q6_0, only vLLM fp8."""


def tensor_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of the named type."""
    return BY_NAME[name].tensor_bytes(shape)


def cache_bytes(cache_type: str, elements: int) -> float:
    """Bytes of `elements` cache elements; a float, because the elements may be a part of a block."""
    if cache_type == "fp8":
        return float(elements)
    kind = BY_NAME[cache_type.upper()]
    return elements / kind.block * kind.block_bytes
