"""Ghosts: sparse GGUF files with a real header and no weights.

A ghost of a 1 T-parameter model takes a few megabytes of disk, answers everything that a header can answer, and lets
llama.cpp plan its memory. It must never be loaded: mapping or reading it would allocate every byte.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.errors import CorruptModel, TokenmillError, UsageError
from tokenmill.model import catalog
from tokenmill.model.gguf import GgufHeader, TensorEntry, is_url, open_source, read_headers
from tokenmill.model.gguf_write import assemble, data_bytes, padded, pair
from tokenmill.storage.atomic import new_file
from tokenmill.units import MIB, format_bytes

MOST_DISK_BYTES = 8 * MIB  # beyond the header; a filesystem without holes needs the whole size


@dataclass(frozen=True, slots=True)
class WrittenGhost:
    """The written file."""

    path: str
    source: str  # the catalogue name, path or address it was made from
    architecture: str | None
    tensors: int
    parameters: int
    apparent_bytes: int
    disk_bytes: int


def write(source: str, target: Path, *, force: bool = False) -> WrittenGhost:
    """Write the ghost of a catalogue name, or of an existing GGUF (any split of it, or an http(s) address)."""
    if not is_url(source) and not Path(source).exists() and catalog.looks_like_name(source):
        made = catalog.encoded(source)
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
    """One header with all keys and tensors of an existing model, however many files it has."""
    headers = read_headers(source)
    if target.is_file() and any(not is_url(h.source) and target.samefile(h.source) for h in headers):
        raise UsageError(f"{target} is the model itself: its ghost would take its place", hint="give another name")
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
        raise CorruptModel(f"{header.source} became shorter while it was read")
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
    """Write the header, extend the file with a hole; return the bytes used on disk."""
    with new_file(target, force=force) as file:
        file.write(raw)
        file.flush()
        try:
            os.truncate(file.fileno(), size)
        except OSError as error:
            raise TokenmillError(
                f"{target.parent} cannot hold a file of {format_bytes(size)}: {error.strerror}",
                hint="write it to a filesystem with large sparse files, such as ext4, xfs, btrfs or tmpfs",
            ) from error
        disk = os.fstat(file.fileno()).st_blocks * 512
        if disk > len(raw) + MOST_DISK_BYTES:
            raise TokenmillError(
                f"the filesystem of {target.parent} cannot make holes: the ghost would take {format_bytes(disk)}",
                hint="write it to one that can, such as ext4, xfs, btrfs or tmpfs",
            )
    return disk
