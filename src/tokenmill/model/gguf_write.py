"""Encodes a GGUF header (keys and tensor table) and returns it together with its parsed form.

Types are those that convert_hf_to_gguf.py uses for the keys in the catalogue: int becomes u32, float f32, and lists
of ints i32.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenmill.model.gguf import (
    DEFAULT_ALIGNMENT,
    MAX_KEPT_ARRAY_ITEMS,
    GgufHeader,
    KeyBytes,
    LongArray,
    MetadataValue,
    TensorEntry,
)
from tokenmill.model.tensor_types import BY_NUMBER, tensor_bytes

Plain = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]
TensorRow = tuple[str, tuple[int, ...], str]
"""One row of a tensor table: name, shape (fastest dimension first), type."""

_NUMBERS = {kind.name: number for number, kind in BY_NUMBER.items()}
_VERSION = 3
_START = struct.Struct("<4sIQQ")
_SCALARS: Mapping[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
_ELEMENTS: Mapping[type, tuple[int, str]] = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file's bytes up to its first tensor, and the header as `gguf.read_header` returns it."""

    raw: bytes
    header: GgufHeader


def encode(keys: Mapping[str, Plain], rows: Iterable[TensorRow], source: str) -> Encoded:
    """Encode the header of a file with consecutive tensors, each padded to the alignment."""
    parts: list[bytes] = []
    values: dict[str, MetadataValue] = {}
    places: dict[str, KeyBytes] = {}
    position = _START.size
    for name, value in keys.items():
        start = text(name)
        body = _encoded(value)
        values[name] = _as_read(value, position + len(start), len(body))
        places[name] = KeyBytes(position, len(start) + len(body))
        position += places[name].bytes
        parts += (start, body)
    tensors = _place(rows)
    raw = assemble(len(values), b"".join(parts), tensors, DEFAULT_ALIGNMENT)
    size = len(raw) + data_bytes(tensors, DEFAULT_ALIGNMENT)
    return Encoded(raw, GgufHeader(source, size, _VERSION, DEFAULT_ALIGNMENT, values, places, tensors, len(raw)))


def assemble(key_count: int, keys: bytes, tensors: Sequence[TensorEntry], alignment: int) -> bytes:
    """The header's bytes from encoded keys and placed tensors."""
    table = b"".join(
        text(tensor.name)
        + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        + struct.pack("<IQ", tensor.number, tensor.offset)
        for tensor in tensors
    )
    head = _START.pack(b"GGUF", _VERSION, len(tensors), key_count) + keys + table
    return head.ljust(padded(len(head), alignment), b"\0")


def data_bytes(tensors: Sequence[TensorEntry], alignment: int) -> int:
    """Length of the data section, including the padding of the last tensor."""
    return max((padded(tensor.offset + tensor.bytes, alignment) for tensor in tensors), default=0)


def padded(count: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-count // alignment) * alignment


def pair(name: str, value: Plain) -> bytes:
    """One key and its value."""
    return text(name) + _encoded(value)


def text(value: str) -> bytes:
    """A length-prefixed string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def as_f32(value: float) -> float:
    """The nearest f32 value."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _place(rows: Iterable[TensorRow]) -> tuple[TensorEntry, ...]:
    offset = 0
    placed = []
    for name, shape, kind in rows:
        size = tensor_bytes(kind, shape)
        placed.append(TensorEntry(name, shape, kind, _NUMBERS[kind], offset, size))
        offset += padded(size)
    return tuple(placed)


def _encoded(value: Plain) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + text(value)
    if not isinstance(value, list):
        number, letter = _SCALARS[type(value)]
        return struct.pack(f"<I{letter}", number, value)
    if isinstance(value[0], str):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join([text(item) for item in value if isinstance(item, str)])
    number, letter = _ELEMENTS[type(value[0])]
    return struct.pack(f"<IIQ{len(value)}{letter}", _ARRAY, number, len(value), *value)


def _as_read(value: Plain, offset: int, length: int) -> MetadataValue:
    """The value as `gguf` reads it from `offset`: long arrays by reference, floats as f32."""
    if isinstance(value, float):
        return as_f32(value)
    if not isinstance(value, list):
        return value
    before = 16  # type, element type and count come before an array's items
    if isinstance(value[0], str):
        return LongArray(_STRING, len(value), offset + before, length - before)
    if len(value) > MAX_KEPT_ARRAY_ITEMS:
        return LongArray(_ELEMENTS[type(value[0])][0], len(value), offset + before, length - before)
    return tuple(as_f32(item) if isinstance(item, float) else item for item in value)
