"""Access to the bytes of model files, and a cursor that reads headers.

`HeaderCursor` reads a header in bounded pieces and checks every length before it allocates memory. Tensor data is never
read.
"""

import os
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tokenmill.errors import CorruptModel, ModelError, UnknownModel
from tokenmill.units import KIB, MIB, format_bytes

FIRST_PIECE_BYTES = 64 * KIB
MAX_PIECE_BYTES = 4 * MIB
MAX_STRING_BYTES = 32 * MIB  # the longest known strings are embedded tokenizer.json files of a few MB
MAX_HEADER_BYTES = 64 * MIB  # without skipped arrays
MAX_SKIPPED_STRING_BYTES = 256 * MIB  # of skipped strings; the largest vocabularies have a few MiB


UNREADABLE = "check the path and its permissions"


class ByteSource(Protocol):
    """Bytes with a name and a length."""

    name: str
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end."""
        ...

    def close(self) -> None:
        """Close the file or connection."""
        ...


class FileSource:
    """A local file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise UnknownModel(f"no such file: {path}", hint="tokenmill models list shows all models") from error
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}", hint=UNREADABLE) from error
        found = os.fstat(self._fd)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):  # a pipe has no length and cannot be read twice
            os.close(self._fd)
            raise ModelError(f"{path} is not a regular file", hint="give a file, not a pipe or a device")

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as error:
            raise ModelError(f"cannot read {self.name}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class HeaderCursor:
    """Reads a header sequentially in growing pieces; checks every length against the remaining bytes."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.position = 0
        self.strings_skipped = 0
        self.items_kept = 0
        self._taken = 0
        self._piece = b""
        self._piece_start = 0
        self._next_bytes = FIRST_PIECE_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.source.close()

    @property
    def left(self) -> int:
        """Bytes left in the file."""
        return self.source.size - self.position

    def take(self, length: int, what: str) -> bytes:
        """Read `length` bytes; `what` names them in errors."""
        if length > self.left:
            raise self.truncated(what)
        self._taken += length
        if self._taken > MAX_HEADER_BYTES:
            raise CorruptModel(f"{self.source.name}: the header exceeds {format_bytes(MAX_HEADER_BYTES)}")
        start = self.position - self._piece_start
        if not 0 <= start <= len(self._piece) - length:
            self._fetch(length, what)
            start = 0
        self.position += length
        return self._piece[start : start + length]

    def skip(self, length: int, what: str) -> None:
        """Skip bytes without reading them."""
        if length > self.left:
            raise self.truncated(what)
        self.position += length

    def number(self, layout: struct.Struct, what: str) -> int | float | bool:
        """Read one number."""
        value: int | float | bool = layout.unpack(self.take(layout.size, what))[0]
        return value

    def string(self, what: str, longest: int = MAX_STRING_BYTES) -> str:
        """Read one length-prefixed string; invalid UTF-8 becomes replacement characters."""
        length = int(self.number(U64, what))
        if length > longest:
            raise CorruptModel(f"{self.source.name}: {what} has an impossible length of {format_bytes(length)}")
        return self.take(length, what).decode("utf-8", "replace")

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` length-prefixed strings."""
        self.strings_skipped += count
        # each skip beyond the current piece reads another one, so without a limit this could read most of the file
        furthest = min(self.position + 8 * count + MAX_SKIPPED_STRING_BYTES, self.source.size)
        for _ in range(count):
            start = self.position - self._piece_start
            if 0 <= start <= len(self._piece) - 8:
                length = U64.unpack_from(self._piece, start)[0]
                self.position += 8
            else:
                length = int(self.number(U64, what))
            self.position += length
            if self.position > furthest:
                raise self.truncated(what) if furthest == self.source.size else self.too_long(what)

    def too_long(self, what: str) -> CorruptModel:
        """The error for strings that are larger than any vocabulary."""
        return CorruptModel(f"{self.source.name}: {what} exceeds {format_bytes(MAX_SKIPPED_STRING_BYTES)} of text")

    def truncated(self, what: str) -> CorruptModel:
        """The error for a file that ends inside `what`."""
        return CorruptModel(
            f"{self.source.name} ends inside {what} (the file has {self.source.size} bytes)",
            hint="the file is damaged or its download is incomplete: download it again",
        )

    def _fetch(self, length: int, what: str) -> None:
        wanted = min(max(length, self._next_bytes), self.left)
        self._piece = self.source.read(self.position, wanted)
        self._piece_start = self.position
        self._next_bytes = min(self._next_bytes * 4, MAX_PIECE_BYTES)
        if len(self._piece) < length:
            raise self.truncated(what)


U64 = struct.Struct("<Q")
