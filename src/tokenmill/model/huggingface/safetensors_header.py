"""Reads the header of one safetensors file: a length and a JSON table. Tensor data is never read.

Checks the table's length, every tensor's position, type and shape, and that the tensors cover the data without overlaps
or gaps, as the format requires.
"""

import json
import stat
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, TypeGuard

from tokenmill.errors import CorruptModel, MissingSplit, ModelError

MAX_HEADER_BYTES = 100_000_000  # limit of the format
MAX_TENSORS = 300_000  # a trillion-parameter checkpoint with one tensor per expert has about 200 000
MAX_DIMENSIONS = 16
MAX_NAME_CHARS = 512
_METADATA_ENTRIES = 8192  # __metadata__ may be as large as this number of tensors: 8 MB, 200 000 delimiters

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_DOWNLOAD_AGAIN = "the download may be incomplete or the file damaged: download it again"
_LFS_POINTER = b"version https://git-lfs"


class StoredTensor(NamedTuple):
    """Type and shape of a tensor as stored."""

    dtype: str
    shape: tuple[int, ...]  # slowest dimension first, as in the file


class SafetensorsEntry(NamedTuple):
    """One tensor of the table; offsets count from the start of the data."""

    name: str
    stored: StoredTensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The checked header of one file."""

    path: Path
    file_bytes: int
    data_offset: int
    entries: tuple[SafetensorsEntry, ...]


class _Malformed(ValueError):
    """The header violates the format; the message follows `FILE: `."""


def read_header(path: Path, *, split: bool = False) -> SafetensorsHeader:
    """Read and check one file's header; `split` if the file is one of several.

    Raises `CorruptModel` for wrong headers, and `MissingSplit` for a truncated file of several.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a FIFO would block forever
            raise CorruptModel(f"{path} is not a regular file")
        with path.open("rb") as file:
            raw = _read_table(file, path, info.st_size, split=split)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        entries = parse_table(raw)
        covered = check_places(entries)
    except _Malformed as error:
        raise CorruptModel(f"{path}: {error}", hint=_DOWNLOAD_AGAIN) from None
    data_offset = 8 + len(raw)
    size = info.st_size
    if data_offset + covered > size:
        _too_short(path, size, data_offset + covered, split=split)
    if data_offset + covered < size:
        raise CorruptModel(
            f"{path} has {size - data_offset - covered} bytes after its last tensor, which loaders reject",
            hint=_DOWNLOAD_AGAIN,
        )
    return SafetensorsHeader(path, size, data_offset, entries)


def _read_table(file: BinaryIO, path: Path, size: int, *, split: bool) -> bytes:
    start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise MissingSplit(f"{path} is a Git LFS pointer, not the model", hint="run: git lfs pull")
    if len(start) < 10:
        _too_short(path, size, 10, split=split)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES or start[8:9] != b"{":
        raise CorruptModel(f"{path} does not start with a safetensors header", hint=_DOWNLOAD_AGAIN)
    if 8 + length > size:
        _too_short(path, size, 8 + length, split=split)
    file.seek(8)
    return _read_plausible(file, path, length)


def _read_plausible(file: BinaryIO, path: Path, length: int) -> bytes:
    """Read a header in pieces; stop early if it is not a table of tensors, so that little memory is used."""
    raw = bytearray()
    tensors = 0
    delimiters = 0
    while len(raw) < length:
        piece = file.read(min(length - len(raw), 1 << 20))
        raw += piece
        tensors += piece.count(b"data_offsets")
        delimiters += piece.count(b",") + piece.count(b":") + piece.count(b"[")
        entries = tensors + _METADATA_ENTRIES
        if not piece or b"\0" in piece or delimiters > 24 * entries or len(raw) > 2 * MAX_NAME_CHARS * entries:
            raise CorruptModel(f"{path}: its header is not a table of tensors", hint=_DOWNLOAD_AGAIN)
        if tensors > MAX_TENSORS:
            raise CorruptModel(f"{path}: its header lists more than {MAX_TENSORS} tensors")
    return bytes(raw)


def _too_short(path: Path, size: int, wanted: int, *, split: bool) -> NoReturn:
    message = f"{path} is truncated: it has {size} of at least {wanted} bytes"
    raise (MissingSplit if split else CorruptModel)(message, hint=_DOWNLOAD_AGAIN)


def parse_table(raw: bytes) -> tuple[SafetensorsEntry, ...]:
    """Parse a header's JSON. Raises `_Malformed`."""
    read = _Declarations()
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=read)
    except _Malformed:
        raise
    except (ValueError, RecursionError):
        raise _Malformed("its header is not valid JSON") from None
    if not isinstance(table, dict):
        raise _Malformed("its header is not a table of tensors")
    table.pop("__metadata__", None)
    return tuple(_entry(name, declared, read.sizes) for name, declared in table.items())


class _Declarations:
    """Converts each JSON object that declares a tensor into (stored, begin, end), sharing equal `StoredTensor`s."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], StoredTensor] = {}
        self.sizes: dict[StoredTensor, int | None] = {}  # bytes; None: unknown type

    def __call__(self, pairs: list[tuple[str, object]]) -> object:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise _Malformed("its header contains a duplicate key")
        if "data_offsets" not in table or "dtype" not in table or "shape" not in table:
            return table
        offsets = table["data_offsets"]
        if not _counts(offsets) or len(offsets) != 2:
            raise _Malformed("the data_offsets of a tensor are not a pair of offsets")
        return self._keep(table["dtype"], table["shape"]), offsets[0], offsets[1]

    def _keep(self, dtype: object, shape: object) -> StoredTensor:
        try:
            key = (dtype, *shape) if isinstance(shape, list) else ()
            if known := self._kept.get(key):
                return known
        except TypeError:  # an unhashable value in the shape
            key = ()
        if not isinstance(dtype, str) or not (dtype.isascii() and dtype.isprintable() and 0 < len(dtype) <= 32):
            raise _Malformed("the dtype of a tensor is not a name")
        if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise _Malformed("the shape of a tensor is not a short list of sizes")
        stored = self._kept[key] = StoredTensor(dtype, tuple(shape))
        bits = DTYPE_BITS.get(dtype)
        self.sizes[stored] = None if bits is None else -(-prod(shape) * bits // 8)
        return stored


def _counts(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110  a plain loop: this runs twice for each of 200 000 tensors
        if type(item) is not int or not 0 <= item < 1 << 63:
            return False
    return True


def _entry(name: str, declared: object, sizes: dict[StoredTensor, int | None]) -> SafetensorsEntry:
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARS:
        raise _Malformed("a tensor has an empty, too long or unprintable name")
    if not isinstance(declared, tuple):
        raise _Malformed(f"tensor {name!r} lacks dtype, shape or data_offsets")
    stored, begin, end = declared
    size = sizes[stored]
    if begin > end:
        raise _Malformed(f"tensor {name!r} ends before its start")
    if size is not None and size != end - begin:
        raise _Malformed(f"tensor {name!r} is {stored.dtype} {list(stored.shape)} but takes {end - begin} bytes")
    return SafetensorsEntry(name, stored, begin, end)


def check_places(entries: tuple[SafetensorsEntry, ...]) -> int:
    """Bytes of data that the tensors cover. Raises `_Malformed` for overlaps and gaps."""
    at = 0
    for entry in sorted(entries, key=itemgetter(2, 3)):
        if entry.begin < at:
            raise _Malformed(f"tensor {entry.name!r} overlaps another")
        if entry.begin > at:
            raise _Malformed(f"{entry.begin - at} bytes before tensor {entry.name!r} are not part of any tensor")
        at = entry.end
    return at
