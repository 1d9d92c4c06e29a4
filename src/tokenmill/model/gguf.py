"""Reads GGUF headers (keys and tensor table) from one file, from splits, or from a URL.

Tensor data is never read. Long arrays (vocabularies, merges) are skipped and represented by type and count. All counts
and lengths are checked against limits before use.
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tokenmill.errors import CorruptModel, MissingSplit, ModelError, RemoteError, UnknownModel
from tokenmill.model.sources import U64, ByteSource, FileSource, HeaderCursor
from tokenmill.model.tensor_types import BY_NUMBER, BlockType
from tokenmill.units import format_bytes

MAX_KEYS = 4096
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 21  # total of all arrays; the largest vocabularies and merges have a few hundred thousand
MAX_KEY_BYTES = 65535  # limit of the format
MAX_TENSOR_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_KEPT_ARRAY_ITEMS = 1024  # longer arrays are skipped; enough for one value per layer
MAX_KEPT_ITEMS = 1 << 16  # total of all arrays; further ones are skipped
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_DAMAGED = "the file is damaged or not a model: download it again"
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf(?:$|[?#]))")

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class LongArray:
    """A skipped array: element type, count and position of its bytes."""

    element: int
    count: int
    offset: int
    bytes: int


MetadataValue = Scalar | tuple[Scalar, ...] | LongArray


@dataclass(frozen=True, slots=True)
class KeyBytes:
    """Position of one key's entry (name, type, value) in the file."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of a tensor table."""

    name: str
    shape: tuple[int, ...]
    type: str
    number: int  # the type's number in the file
    offset: int  # from the start of the data section
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one GGUF file."""

    source: str
    file_bytes: int
    version: int
    alignment: int
    keys: dict[str, MetadataValue]
    key_bytes: dict[str, KeyBytes]
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    guesses: tuple[str, ...] = ()

    def text(self, key: str) -> str | None:
        """A string value, or None."""
        value = self.keys.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """A non-negative integer value, or None."""
        value = self.keys.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def read_headers(where: str | Path, headers: dict[str, str] | None = None) -> tuple[GgufHeader, ...]:
    """Read the headers of all files of a model, given any one of them; `headers` are sent with HTTP requests."""
    first = read_header(where, headers)
    count = first.integer("split.count") or 1
    if count <= 1:
        return (first,)
    if count > 10_000:
        raise CorruptModel(f"{where} claims to be one of {count} splits")
    match = _SPLIT_NAME.search(str(where))
    if match is None:
        raise MissingSplit(
            f"{where} is one of {count} splits, but its name does not end in -0000N-of-{count:05}.gguf",
            hint="rename the files to their original names",
        )
    found = []
    for number in range(1, count + 1):
        name = f"{str(where)[: match.start()]}-{number:05}-of-{count:05}{str(where)[match.end() :]}"
        header = first if name == str(where) else _read_split(name, headers)
        if header.integer("split.no") != number - 1:
            raise CorruptModel(
                f"{name} has split.no {header.keys.get('split.no')}, not {number - 1}",
                hint="the folder may contain files of two models",
            )
        found.append(header)
    promised = first.integer("split.tensors.count")
    present = sum(len(header.tensors) for header in found)
    if promised is not None and promised != present:
        raise CorruptModel(
            f"{where}: the splits contain {present} tensors instead of {promised}",
            hint="the folder may contain files of two models",
        )
    return tuple(found)


def _read_split(name: str, headers: dict[str, str] | None) -> GgufHeader:
    hint = "complete the download: the model needs all its files"
    try:
        return read_header(name, headers)
    except UnknownModel as error:
        raise MissingSplit(f"{name} is missing", hint=hint) from error
    except RemoteError as error:
        raise MissingSplit(f"{name} cannot be read: {error.message}", hint=hint) from error
    except CorruptModel as error:
        raise MissingSplit(f"split {name}: {error.message}", hint=hint) from error


def read_header(where: str | Path, headers: dict[str, str] | None = None) -> GgufHeader:
    """Read one file's header and check it against the file's length.

    Raises `CorruptModel` for damaged files and other errors of `tokenmill.errors.ModelError`.
    """
    with HeaderCursor(open_source(where, headers)) as cursor:
        try:
            return _parse(cursor)
        except CorruptModel as error:
            error.hint = error.hint or _DAMAGED
            raise


def open_source(where: str | Path, headers: dict[str, str] | None = None) -> ByteSource:
    """Open a path or an http(s) URL."""
    if is_url(where):
        from tokenmill.model.remote import UrlSource  # noqa: PLC0415  importing an HTTP client takes 0.1 s

        return UrlSource(str(where), headers)
    return FileSource(Path(where))


def is_url(where: str | Path) -> bool:
    """Whether this is an http(s) URL."""
    return str(where).lower().startswith(("http://", "https://"))


def _parse(cursor: HeaderCursor) -> GgufHeader:
    name = cursor.source.name
    size = cursor.source.size
    if size == 0:
        raise CorruptModel(f"{name} is empty", hint="download it again")
    _check_magic(cursor.take(min(size, 64), "the first bytes"), name)
    cursor.position = 4
    version = _version(cursor)
    tensor_count = int(cursor.number(U64, "the tensor count"))
    key_count = int(cursor.number(U64, "the key count"))
    # the smallest key has 14 bytes, the smallest tensor entry 33
    if key_count > min(MAX_KEYS, cursor.left // 14):
        raise CorruptModel(f"{name}: {key_count} keys are impossible in a file of {format_bytes(size)}")
    if tensor_count > min(MAX_TENSORS, cursor.left // 33):
        raise CorruptModel(f"{name}: {tensor_count} tensors are impossible in a file of {format_bytes(size)}")

    keys: dict[str, MetadataValue] = {}
    key_bytes: dict[str, KeyBytes] = {}
    for index in range(key_count):
        start = cursor.position
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if not key or key in keys:
            raise CorruptModel(f"{name}: key {index} is {f'a duplicate: {key[:80]}' if key else 'empty'}")
        keys[key] = _value(cursor, key)
        key_bytes[key] = KeyBytes(start, cursor.position - start)
    alignment = _alignment(keys.get("general.alignment", DEFAULT_ALIGNMENT), name)
    entries = [_entry(cursor, index, alignment) for index in range(tensor_count)]
    if len({entry[0] for entry in entries}) != len(entries):
        raise CorruptModel(f"{name}: two tensors have the same name")
    data_offset = -(-cursor.position // alignment) * alignment
    tensors, guesses = _sizes(entries, size - data_offset, alignment, name)
    return GgufHeader(name, size, version, alignment, keys, key_bytes, tensors, data_offset, guesses)


def _check_magic(first: bytes, name: str) -> None:
    if first[:4] == b"GGUF":
        return
    hint = None
    if first.startswith(b"version https://git-lfs"):
        hint = "it is a Git LFS pointer: run git lfs pull"
    elif first[8:9] == b"{":
        hint = "it looks like safetensors: give the folder with its config.json"
    elif first.lstrip().lower().startswith((b"<!doctype", b"<html")):
        hint = "it is a web page: the download needs a token or another URL"
    elif first[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        hint = "it is a GGML file, the format before GGUF: download the model as GGUF"
    elif first[:2] == b"PK":
        hint = "it is a zip archive, such as a wheel or a PyTorch file"
    raise CorruptModel(f"{name} is not a GGUF file", hint=hint)


def _version(cursor: HeaderCursor) -> int:
    version = int(cursor.number(_SCALARS[4], "the version"))
    if version in (2, 3):
        return version
    name = cursor.source.name
    if version & 0xFFFF == 0 and version:
        raise ModelError(f"{name} is a big-endian GGUF", hint="use the little-endian file")
    if version == 1:
        raise ModelError(f"{name} is a GGUF of version 1 (August 2023)", hint="convert the model again")
    raise ModelError(
        f"{name} is a GGUF of version {version}, but only 2 and 3 are supported", hint="a newer tokenmill may read it"
    )


def _value(cursor: HeaderCursor, key: str) -> MetadataValue:
    kind = int(cursor.number(_SCALARS[4], f"the type of {key}"))
    if kind == _STRING:
        return cursor.string(key)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise CorruptModel(f"{cursor.source.name}: {key} has an unknown type, {kind}")
    return cursor.number(_SCALARS[kind], key)


def _array(cursor: HeaderCursor, key: str) -> MetadataValue:
    name = cursor.source.name
    element = int(cursor.number(_SCALARS[4], key))
    count = int(cursor.number(U64, key))
    start = cursor.position
    if element in _SCALARS:
        layout = _SCALARS[element]
        if count <= MAX_KEPT_ARRAY_ITEMS and cursor.items_kept + count <= MAX_KEPT_ITEMS:
            cursor.items_kept += count
            raw = cursor.take(count * layout.size, key)
            return tuple(value for (value,) in layout.iter_unpack(raw))
        cursor.skip(count * layout.size, key)
    elif element == _STRING:
        if count > min(MAX_STRINGS - cursor.strings_skipped, cursor.left // 8):
            raise CorruptModel(f"{name}: {key} claims {count} strings")
        cursor.skip_strings(count, key)
    else:
        what = "an array of arrays" if element == _ARRAY else f"an array of unknown type {element}"
        raise CorruptModel(f"{name}: {key} is {what}")
    return LongArray(element, count, start, cursor.position - start)


def _alignment(value: MetadataValue, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20 and value & (value - 1) == 0:
        return value
    raise CorruptModel(f"{name}: general.alignment is {str(value)[:80]!r}, not a power of two")


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type number, offset


def _entry(cursor: HeaderCursor, index: int, alignment: int) -> _Entry:
    file = cursor.source.name
    name = cursor.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    dimensions = int(cursor.number(_SCALARS[4], f"tensor {name}"))
    if not name or not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CorruptModel(f"{file}: tensor {index} ({name!r}) has {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"tensor {name}"))
    if min(shape) == 0 or prod(shape) >= 1 << 62:
        raise CorruptModel(f"{file}: tensor {name} has an impossible shape, {'x'.join(map(str, shape))}")
    kind = int(cursor.number(_SCALARS[4], f"tensor {name}"))
    offset = int(cursor.number(U64, f"tensor {name}"))
    if offset % alignment:
        raise CorruptModel(f"{file}: tensor {name} does not start at a multiple of {alignment}")
    return name, shape, kind, offset


def _sizes(
    entries: list[_Entry], data_bytes: int, alignment: int, file: str
) -> tuple[tuple[TensorEntry, ...], tuple[str, ...]]:
    """Compute the bytes of all tensors by type or, for unknown types, by the distance to the next tensor."""
    order = sorted(range(len(entries)), key=lambda index: entries[index][3])
    ends = [*(entries[index][3] for index in order[1:]), data_bytes]
    tensors: list[TensorEntry | None] = [None] * len(entries)
    guesses = []
    for index, end in zip(order, ends, strict=False):
        name, shape, number, offset = entries[index]
        kind = BY_NUMBER.get(number)
        available = end - offset
        is_last = index == order[-1]
        size = _known_bytes(kind, shape, name, file) if kind else max(available, prod(shape) // 16)
        if kind and kind.ik and not is_last and not 0 <= available - size < alignment:
            size = available
            guesses.append(f"the size of {kind.name} tensors is the distance to the next tensor in the file")
        elif kind is None:
            guesses.append(
                f"tensor type {number} is unknown, so the size of its tensors is the distance to the next tensor"
            )
        if size > available and offset + size > data_bytes:
            missing = format_bytes(offset + size - data_bytes)
            raise CorruptModel(
                f"{file} is truncated: tensor {name} needs {missing} more",
                hint="the download is incomplete: download it again",
            )
        if size > available or available <= 0:
            raise CorruptModel(f"{file}: tensor {name} overlaps the next one")
        tensors[index] = TensorEntry(name, shape, kind.name if kind else f"type {number}", number, offset, size)
    return tuple(tensor for tensor in tensors if tensor), tuple(dict.fromkeys(guesses))


def _known_bytes(kind: BlockType, shape: tuple[int, ...], name: str, file: str) -> int:
    try:
        return kind.tensor_bytes(shape)
    except ValueError as error:
        raise CorruptModel(f"{file}: tensor {name}: {error}") from error
