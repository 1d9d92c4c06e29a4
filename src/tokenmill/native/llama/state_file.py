"""Files that hold the cells of one head, so that it survives a restart.

    magic 16 B | version u32 | header length u32 | header: JSON | tokens: int32 each | llama.cpp's state | SHA-256

Written under another name, flushed, then renamed: a file of the right name is whole. The state goes from and to the
file through a mapping, so that however large it is, it takes no memory but the page cache. Knows no llama.cpp.
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
from tokenmill.units import MIB

MAGIC = b"tokenmill head\x1a\n"
VERSION = 1
_FIXED = struct.Struct("<16sII")
_DIGEST_BYTES = 32
_BLOCK_BYTES = 8 * MIB
_MOST_HEADER_BYTES = MIB
DAMAGED_HINT = "remove it: the head is computed again when it is needed"


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A saved head: whose it is, its tokens, and where its state lies in the file."""

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
    """Save a head; `fill` writes its state into the mapping from an offset on. Returns the file's size."""
    header = json.dumps({"identity": dict(identity), "tokens": len(tokens), "state_bytes": state_bytes}).encode()
    front = _FIXED.pack(MAGIC, VERSION, len(header)) + header + np.asarray(tokens, "<i4").tobytes()
    size = len(front) + state_bytes + _DIGEST_BYTES
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a dead process later
            with mmap.mmap(file.fileno(), size) as mapped:
                mapped[: len(front)] = front
                fill(mapped, len(front))
                mapped[size - _DIGEST_BYTES :] = _digest(mapped, size - _DIGEST_BYTES)
                mapped.flush()
    except OSError as error:
        raise EngineError(
            f"the head cannot be saved to {path}: {error.strerror}",
            hint=f"it needs {-(-size // MIB)} MiB there",
        ) from error
    return size


@contextmanager
def opened(path: Path, identity: Mapping[str, str]) -> Iterator[SavedPrefix]:
    """A saved head, checked to the last byte; ForeignState if it belongs to something else."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FIXED.size:
                raise ForeignState(f"{path} is no saved head", hint="tokenmill writes them as .head files")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise EngineError(f"the head in {path} cannot be read: {error.strerror}") from error
    with mapped, memoryview(mapped) as view:
        head = _parse(path, view, identity)
        try:
            yield head
        finally:
            head.state.release()


def tokens_in(path: Path) -> int:
    """How many tokens a saved head says it has, for making room; nothing else is checked."""
    try:
        with path.open("rb") as file:
            magic, _, header_bytes = _FIXED.unpack(file.read(_FIXED.size))
            if magic != MAGIC or header_bytes > _MOST_HEADER_BYTES:
                raise ForeignState(f"{path} is no saved head", hint="tokenmill writes them as .head files")
            return int(json.loads(file.read(header_bytes))["tokens"])
    except OSError as error:
        raise EngineError(f"the head in {path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ForeignState(f"{path} is no saved head", hint="tokenmill writes them as .head files") from error


def _parse(path: Path, view: memoryview, identity: Mapping[str, str]) -> SavedPrefix:
    magic, version, header_bytes = _FIXED.unpack(view[: _FIXED.size])
    if magic != MAGIC:
        raise ForeignState(f"{path} is no saved head", hint="tokenmill writes them as .head files")
    if version != VERSION:
        raise ForeignState(
            f"{path} is a saved head of version {version}, not {VERSION}", hint="it was saved by another tokenmill"
        )
    damaged = EngineError(f"the saved head {path} is damaged", hint=DAMAGED_HINT)
    if header_bytes > min(_MOST_HEADER_BYTES, len(view) - _FIXED.size):
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
    # Before the digest, which reads all of a file that may be large and another's.
    differs = [name for name in {**identity, **found} if identity.get(name) != found.get(name)]
    if differs:
        told = "; ".join(f"{name} {found.get(name)!r}, here {identity.get(name)!r}" for name in sorted(differs))
        raise ForeignState(f"the saved head {path} belongs elsewhere: {told}", hint=DAMAGED_HINT)
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
