"""Generates random weights directly in the blocks of a tensor type, a gigabyte in seconds.

The codes of a block are random bits, and its scales give the weights the requested standard deviation; no floats are
quantized. The bits come from the raw stream of SFC64, which numpy keeps stable, so that a seed gives the same bytes on
all machines.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tokenmill.model.tensor_types import BY_NAME
from tokenmill.units import MIB

PIECE_BYTES = 8 * MIB

FixedBlocks = list[tuple[int, bytes]]
"""The parts of a block that are not random: (position, bytes)."""


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


def _deviation(levels: int) -> float:
    """Standard deviation of `levels` evenly spaced, equally likely codes."""
    return float(((levels**2 - 1) / 12) ** 0.5)


# for unsigned codes, the block's minimum makes the mean of the weights zero
_SCALES_32 = b"\xa0" * 8 + b"\0" * 4  # Q4_K, Q5_K: eight 6-bit scales and eight 6-bit minima, all 32
_FIXED: Mapping[str, Callable[[float], FixedBlocks]] = {
    "Q4_0": lambda std: [(0, _half(std / _deviation(16)))],
    "Q4_1": lambda std: [(0, _half(std / _deviation(16)) + _half(-7.5 * std / _deviation(16)))],
    "Q5_0": lambda std: [(0, _half(std / _deviation(32)))],
    "Q5_1": lambda std: [(0, _half(std / _deviation(32)) + _half(-15.5 * std / _deviation(32)))],
    "Q8_0": lambda std: [(0, _half(std / _deviation(256)))],
    "Q2_K": lambda std: [
        (0, b"\x88" * 16),  # sixteen 4-bit scales and minima, all 8
        (80, _half(std / _deviation(4) / 8) + _half(1.5 * std / _deviation(4) / 8)),
    ],
    "Q3_K": lambda std: [
        (96, b"\0" * 8 + b"\xff" * 4),  # sixteen 6-bit scales, all 48, which stands for 16
        (108, _half(std / _deviation(8) / 16)),
    ],
    "Q4_K": lambda std: [(0, _half(std / _deviation(16) / 32) + _half(7.5 * std / _deviation(16) / 32) + _SCALES_32)],
    "Q5_K": lambda std: [(0, _half(std / _deviation(32) / 32) + _half(15.5 * std / _deviation(32) / 32) + _SCALES_32)],
    "Q6_K": lambda std: [(192, b"\x20" * 16 + _half(std / _deviation(64) / 32))],
    "IQ4_NL": lambda std: [(0, _half(std / 67.4))],  # the deviation of its sixteen uneven levels
    "MXFP4": lambda std: [(0, bytes([127 + round(np.log2(std / 3.0))]))],  # levels deviate by about 3
}
# Signed codes have one more value below zero than above. A random sign of the scale makes their mean zero; otherwise
# one direction would dominate in a deep model.
_SCALE_AT = {"Q4_0": 0, "Q5_0": 0, "Q8_0": 0, "Q3_K": 108, "Q6_K": 208, "IQ4_NL": 0}
TYPES = (*_FIXED, "F16", "BF16", "F32")
"""Supported tensor types."""


def pieces(name: str, kind: str, shape: tuple[int, ...], seed: int, std: float) -> Iterator[NDArray[np.uint8]]:
    """Yield the tensor's bytes in pieces of a few megabytes."""
    bits = np.random.SFC64(np.random.SeedSequence([seed, crc32(name.encode())]))
    block = BY_NAME[kind]
    left = prod(shape) // block.block
    # whole words per piece, so that the bytes do not depend on the size of pieces
    max_count = max(PIECE_BYTES // block.block_bytes // 8, 1) * 8
    while left:
        count = min(left, max_count)
        yield _floats(bits, kind, count, std) if block.block == 1 else _blocks(bits, kind, count, std)
        left -= count


def constant(shape: tuple[int, ...], value: float) -> NDArray[np.uint8]:
    """An F32 tensor of one value."""
    return np.full(prod(shape), value, dtype="<f4").view(np.uint8)


def _blocks(bits: np.random.SFC64, kind: str, count: int, std: float) -> NDArray[np.uint8]:
    size = BY_NAME[kind].block_bytes
    raw = _random(bits, count * size).reshape(count, size)
    sign_byte = _SCALE_AT[kind] + 1 if kind in _SCALE_AT else None
    signs = None if sign_byte is None else raw[:, sign_byte] & 0x80
    for position, fixed in _FIXED[kind](std):
        raw[:, position : position + len(fixed)] = np.frombuffer(fixed, np.uint8)
    if signs is not None:
        raw[:, sign_byte] |= signs
    return raw.reshape(-1)


def _floats(bits: np.random.SFC64, kind: str, count: int, std: float) -> NDArray[np.uint8]:
    codes = _random(bits, 2 * count).view("<u2").astype(np.float32)
    values = (codes - 32767.5) * np.float32(std / _deviation(1 << 16))
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return values.astype("<f2").view(np.uint8)
    return np.ascontiguousarray((values.view("<u4") >> 16).astype("<u2")).view(np.uint8)


def _random(bits: np.random.SFC64, count: int) -> NDArray[np.uint8]:
    words = np.asarray(bits.random_raw(-(-count // 8)), dtype="<u8")
    return words.view(np.uint8)[:count].copy()
