"""Writes ghosts: sparse GGUF files with a real header and no weights.

A ghost of a model with 1 T parameters takes a few megabytes of disk. tokenmill reads its header like that of the model,
and llama.cpp can plan its memory. It must never be loaded, because mapping or reading it allocates memory for all
weights.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.errors import CorruptModel, TokenmillError, UsageError
from tokenmill.model import catalog, derived
from tokenmill.model.gguf import GgufHeader, TensorEntry, is_url, open_source, read_headers
from tokenmill.model.gguf_write import assemble, data_bytes, padded, pair
from tokenmill.storage.atomic import new_file
from tokenmill.units import MIB, format_bytes

MAX_DISK_BYTES = 8 * MIB  # in addition to the header; a file system without sparse files needs the whole size


@dataclass(frozen=True, slots=True)
class WrittenGhost:
    """The written file."""

    path: str
    source: str  # the catalogue name, path or URL of the model
    architecture: str | None
    tensors: int
    parameters: int
    apparent_bytes: int
    disk_bytes: int


def write(source: str, target: Path, *, force: bool = False) -> WrittenGhost:
    """Write the ghost of a catalogue entry, a config.json or an existing GGUF (any split, or an http(s) URL).

    Raises `UsageError` if the target exists (without `force`) or is the model, and `TokenmillError` if the file system
    has no sparse files.
    """
    config = derived.reference(source)
    if config is not None or (not is_url(source) and not Path(source).exists() and catalog.looks_like_name(source)):
        made = catalog.encoded(source) if config is None else derived.encoded_config(config)
        raw = made.raw
        size = made.header.file_bytes
        header = made.header
    else:
        raw, size, header = _copied(source, target)
    disk = _write(raw, size, target, force=force)
    return WrittenGhost(
        path=str(target),
        source=header.source,
        architecture=header.text("general.architecture"),
        tensors=len(header.tensors),
        parameters=sum(tensor.elements for tensor in header.tensors),
        apparent_bytes=size,
        disk_bytes=disk,
    )


def _copied(source: str, target: Path) -> tuple[bytes, int, GgufHeader]:
    """One header with all keys and tensors of an existing model, which may have several files."""
    headers = read_headers(source)
    if target.is_file() and any(not is_url(h.source) and target.samefile(h.source) for h in headers):
        raise UsageError(f"{target} is the model itself and would be overwritten", hint="use another name")
    first = headers[0]
    kept = {
        key: place
        for key, place in first.key_bytes.items()
        if key != catalog.GHOST_KEY and not key.startswith("split.")
    }
    keys = _key_bytes(first, [(place.offset, place.bytes) for place in kept.values()])
    keys += pair(catalog.GHOST_KEY, True)
    tensors = _joined(headers)
    raw = assemble(len(kept) + 1, keys, tensors, first.alignment)
    return raw, len(raw) + data_bytes(tensors, first.alignment), replace(first, tensors=tensors)


def _key_bytes(header: GgufHeader, places: list[tuple[int, int]]) -> bytes:
    if not places:
        return b""
    start = places[0][0]
    end = max(offset + size for offset, size in places)
    opened = open_source(header.source)
    try:
        region = opened.read(start, end - start)
    finally:
        opened.close()
    if len(region) != end - start:
        raise CorruptModel(f"{header.source} was truncated while it was read")
    return b"".join(region[offset - start : offset - start + size] for offset, size in places)


def _joined(headers: tuple[GgufHeader, ...]) -> tuple[TensorEntry, ...]:
    """The tensors of all files in sequence, as in a single file."""
    offset = 0
    joined = []
    for tensor in (tensor for header in headers for tensor in sorted(header.tensors, key=lambda t: t.offset)):
        joined.append(replace(tensor, offset=offset))
        offset += padded(tensor.bytes, headers[0].alignment)
    return tuple(joined)


def _write(raw: bytes, size: int, target: Path, *, force: bool) -> int:
    """Write the header and extend the file with a hole; return the bytes used on disk."""
    with new_file(target, force=force) as file:
        file.write(raw)
        file.flush()
        try:
            os.truncate(file.fileno(), size)
        except OSError as error:
            raise TokenmillError(
                f"{target.parent} cannot hold a file of {format_bytes(size)}: {error.strerror}",
                hint="use a file system that supports large sparse files, such as ext4, xfs, btrfs or tmpfs",
            ) from error
        disk = os.fstat(file.fileno()).st_blocks * 512
        if disk > len(raw) + MAX_DISK_BYTES:
            raise TokenmillError(
                f"the file system of {target.parent} has no sparse files, so the ghost would take {format_bytes(disk)}",
                hint="use a file system that supports sparse files, such as ext4, xfs, btrfs or tmpfs",
            )
    return disk
