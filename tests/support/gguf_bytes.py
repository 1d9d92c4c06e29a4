"""Writes valid and invalid GGUF headers byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.model.tensor_types import BY_NAME, BY_NUMBER

NUMBER_OF = {kind.name: number for number, kind in BY_NUMBER.items()}
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any, kind: int | None = None) -> bytes:
    """A typed value; integers are uint32 unless told."""
    if kind is None:
        kind = {bool: 7, int: 4, float: 6, str: 8}[type(item)]
    return struct.pack("<I", kind) + (text(item) if kind == 8 else struct.pack("<" + FORMATS[kind], item))


def array(element: int, items: Sequence[Any]) -> bytes:
    body = b"".join(text(item) if element == 8 else struct.pack("<" + FORMATS[element], item) for item in items)
    return struct.pack("<IIQ", 9, element, len(items)) + body


def entry(name: str, shape: Sequence[int], kind: str | int, offset: int) -> bytes:
    number = NUMBER_OF[kind] if isinstance(kind, str) else kind
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)


def header(
    keys: Mapping[str, Any],
    entries: Sequence[bytes],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """Keys are plain values or already packed bytes."""
    counts = (len(entries) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    packed = [text(key) + (item if isinstance(item, bytes) else value(item)) for key, item in keys.items()]
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(packed) + b"".join(entries)


def tensors(table: Sequence[tuple[str, Sequence[int], str]], alignment: int = 32) -> tuple[list[bytes], int]:
    """Entries laid out one after another, and the length of their data."""
    offset, entries = 0, []
    for name, shape, kind in table:
        entries.append(entry(name, shape, kind, offset))
        end = offset + BY_NAME[kind].tensor_bytes(tuple(shape))
        offset = -(-end // alignment) * alignment
    return entries, offset


def write(
    path: Path, keys: Mapping[str, Any], table: Sequence[tuple[str, Sequence[int], str]], *, alignment: int = 32
) -> Path:
    """A whole file whose data is a hole."""
    entries, data_bytes = tensors(table, alignment)
    raw = header(keys, entries)
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(-(-len(raw) // alignment) * alignment + data_bytes)
    return path


TINY_KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}
TINY_TABLE: list[tuple[str, Sequence[int], str]] = [
    ("token_embd.weight", (64, 100), "F16"),
    ("output_norm.weight", (64,), "F32"),
    *(
        row
        for layer in range(2)
        for row in (
            (f"blk.{layer}.attn_norm.weight", (64,), "F32"),
            (f"blk.{layer}.attn_q.weight", (64, 64), "Q8_0"),
            (f"blk.{layer}.ffn_up.weight", (64, 128), "Q4_0"),
        )
    ),
]
