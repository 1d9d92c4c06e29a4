"""Writes folders of safetensors with correct tables and sparse data, and invalid ones."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tokenmill.model.huggingface.safetensors_header import DTYPE_BITS

Table = Mapping[str, tuple[str, Sequence[int]]]


def header(table: Table, metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """A header's JSON for tensors that follow one another, and the bytes of their data."""
    at, declared = 0, dict[str, Any]()
    if metadata is not None:
        declared["__metadata__"] = metadata
    for name, (dtype, shape) in table.items():
        end = at + prod(shape) * DTYPE_BITS[dtype] // 8
        declared[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return json.dumps(declared, separators=(",", ":")).encode(), at


def write_raw(path: Path, raw: bytes, data_bytes: int = 0, *, length: int | None = None) -> Path:
    """A file with this header, whatever it is, and a hole for data; `length` is what it claims the header to be."""
    with path.open("wb") as file:
        file.write((len(raw) if length is None else length).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + data_bytes)
    return path


def write_file(path: Path, table: Table) -> Path:
    return write_raw(path, *header(table))


def write_folder(
    folder: Path, table: Table, config: Mapping[str, Any] | None, *, shards: int = 1, index: bool = True
) -> Path:
    """A model folder; with several shards the tensors are dealt out in runs."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_file(folder / "model.safetensors", table)
        return folder
    names = list(table)
    run = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: table[name] for name in names[number * run : (number + 1) * run]}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if index:
        body = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return folder
