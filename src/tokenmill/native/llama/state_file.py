"""Saves the KV cells of a prefix to a file, so that they survive a restart. Independent of llama.cpp.

    magic 16 B | version u32 | header length u32 | header: JSON | tokens: int32 each | llama.cpp's state | SHA-256

`write` writes a temporary file, flushes and renames it, so a file with the final name is complete. The state is copied
through a mapping of the file, so it needs no memory except the page cache.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.errors import EngineError, ForeignState
from tokenmill.storage.atomic import replacing
from tokenmill.storage.private import private_folder
from tokenmill.units import MIB

MAGIC = b"tokenmill head\x1a\n"
VERSION = 1
_FIXED = struct.Struct("<16sII")
_DIGEST_BYTES = 32
_BLOCK_BYTES = 8 * MIB
_MAX_HEADER_BYTES = MIB
DAMAGED_HINT = "remove it: the prefix is computed again when it is needed"


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A saved prefix: the identity of its model and build, its tokens, and a view of its state in the file."""

    identity: Mapping[str, str]
    tokens: tuple[int, ...]
    state: memoryview


def write(
    path: Path,
    identity: Mapping[str, str],
    tokens: Sequence[int],
    state_bytes: int,
    fill: Callable[[mmap.mmap, int], None],
) -> int:
    """Save a prefix and return the size of the file; `fill` writes the state into the mapping at an offset."""
    header = json.dumps({"identity": dict(identity), "tokens": len(tokens), "state_bytes": state_bytes}).encode()
    front = _FIXED.pack(MAGIC, VERSION, len(header)) + header + np.asarray(tokens, "<i4").tobytes()
    size = len(front) + state_bytes + _DIGEST_BYTES
    try:
        private_folder(path.parent)
        with replacing(path) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here; later it would be SIGBUS
            with mmap.mmap(file.fileno(), size) as mapped:
                mapped[: len(front)] = front
                fill(mapped, len(front))
                mapped[size - _DIGEST_BYTES :] = _digest(mapped, size - _DIGEST_BYTES)
                mapped.flush()
    except OSError as error:
        raise EngineError(
            f"the prefix cannot be saved to {path}: {error.strerror}",
            hint=f"it needs {-(-size // MIB)} MiB there",
        ) from error
    return size


@contextmanager
def opened(path: Path, identity: Mapping[str, str]) -> Iterator[SavedPrefix]:
    """Open a saved prefix and verify its digest; ForeignState if it belongs to another model or build."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FIXED.size:
                raise ForeignState(f"{path} is not a saved prefix", hint="tokenmill saves prefixes as .head files")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise EngineError(f"the prefix in {path} cannot be read: {error.strerror}") from error
    with mapped, memoryview(mapped) as view:
        prefix = _parse(path, view, identity)
        try:
            yield prefix
        finally:
            prefix.state.release()


def tokens_in(path: Path) -> int:
    """Return the number of tokens in the file's header, without verifying the rest."""
    try:
        with path.open("rb") as file:
            magic, _, header_bytes = _FIXED.unpack(file.read(_FIXED.size))
            if magic != MAGIC or header_bytes > _MAX_HEADER_BYTES:
                raise ForeignState(f"{path} is not a saved prefix", hint="tokenmill saves prefixes as .head files")
            return int(json.loads(file.read(header_bytes))["tokens"])
    except OSError as error:
        raise EngineError(f"the prefix in {path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ForeignState(f"{path} is not a saved prefix", hint="tokenmill saves prefixes as .head files") from error


def _parse(path: Path, view: memoryview, identity: Mapping[str, str]) -> SavedPrefix:
    magic, version, header_bytes = _FIXED.unpack(view[: _FIXED.size])
    if magic != MAGIC:
        raise ForeignState(f"{path} is not a saved prefix", hint="tokenmill saves prefixes as .head files")
    if version != VERSION:
        raise ForeignState(
            f"{path} is a saved prefix of version {version}, not {VERSION}",
            hint="it was saved by another version of tokenmill",
        )
    damaged = EngineError(f"the saved prefix {path} is damaged", hint=DAMAGED_HINT)
    if header_bytes > min(_MAX_HEADER_BYTES, len(view) - _FIXED.size):
        raise damaged
    start = _FIXED.size + header_bytes
    try:
        header = json.loads(bytes(view[_FIXED.size : start]))
        found = dict(header["identity"])
        count = int(header["tokens"])
        state_bytes = int(header["state_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise damaged from error
    end = start + 4 * count
    if min(count, state_bytes) < 0 or end + state_bytes + _DIGEST_BYTES != len(view):
        raise damaged
    # Compare before the digest, which reads the whole file.
    differs = [name for name in {**identity, **found} if identity.get(name) != found.get(name)]
    if differs:
        differences = "; ".join(f"{name} {found.get(name)!r}, here {identity.get(name)!r}" for name in sorted(differs))
        raise ForeignState(f"the saved prefix {path} does not match this engine: {differences}", hint=DAMAGED_HINT)
    if _digest(view, len(view) - _DIGEST_BYTES) != bytes(view[len(view) - _DIGEST_BYTES :]):
        raise damaged
    tokens = tuple(np.frombuffer(view[start:end], "<i4").tolist())
    return SavedPrefix(found, tokens, view[end : end + state_bytes])


def _digest(data: mmap.mmap | memoryview, end: int) -> bytes:
    digest = hashlib.sha256()
    with memoryview(data) as view:
        for at in range(0, end, _BLOCK_BYTES):
            with view[at : min(at + _BLOCK_BYTES, end)] as block:
                digest.update(block)
    return digest.digest()
