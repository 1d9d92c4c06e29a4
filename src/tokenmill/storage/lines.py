"""Files as a stream of numbered lines, from a path or stdin: plain, gzip or zstd.

Compression is detected from a file's first bytes, not its name. Memory is bounded by the maximum line length. An
unreadable line becomes a `BadLine`; an unreadable file raises UsageError.
"""

import gzip
import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from tokenmill.errors import UsageError
from tokenmill.units import KIB, MIB, format_bytes

BLOCK_BYTES = 512 * KIB
LONGEST_LINE_BYTES = 32 * MIB
_BOM = b"\xef\xbb\xbf"
_BLANK = " \t\r"
_LOOKED_AT = 1024
_CONTROL = bytes({*range(32), 127} - {*b"\t\n\r\f\x1b"})
_MAX_CONTROL_SHARE = 0.05  # a file that begins with more control characters is binary
_MAX_CONTROL = 4
_PARQUET = b"PAR1"
_PACK_AGAIN = "download or compress it again"
_FILE_HINT = "check the path and its permissions"


class Chunk(NamedTuple):
    """Whole lines, of which the last may lack its line end, and the number of the first."""

    first: int
    data: bytes


class BadLine(NamedTuple):
    """An unusable line, and the reason."""

    number: int
    reason: str


ParquetReader = Callable[[str, BinaryIO], Iterator["Chunk | BadLine"]]
"""Returns the rows of a Parquet file as lines; called with its name and the open file."""


def is_parquet(path: Path) -> bool:
    """Whether a file's first bytes are those of Parquet; UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=_FILE_HINT) from error


def split(chunk: Chunk) -> Iterator[tuple[int, str] | BadLine]:
    """The lines of a chunk with their numbers, without blank ones."""
    try:
        texts: list[str | BadLine] = [*chunk.data.decode().split("\n")]
    except UnicodeDecodeError:
        texts = [_decoded(chunk.first + index, raw) for index, raw in enumerate(chunk.data.split(b"\n"))]
    for number, text in enumerate(texts, chunk.first):
        if isinstance(text, BadLine):
            yield text
        elif text := text.strip(_BLANK):
            yield number, text


def _decoded(number: int, raw: bytes) -> str | BadLine:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return BadLine(number, f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}")


@dataclass(slots=True)
class Source:
    """An open file."""

    name: str
    digest: str | None  # of the file's bytes; None: a stream that has not been read to its end
    _content: Iterator[Chunk | BadLine]
    _ended: Callable[[], str]  # returns the digest; UsageError if the file changed while it was read

    def chunks(self) -> Iterator[Chunk | BadLine]:
        """The contents; can be read only once. Sets `digest` at the end."""
        try:
            yield from self._content
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror or error}", hint=_FILE_HINT) from error
        self.digest = self._ended()


def chunks(
    blocks: Iterator[bytes], longest_bytes: int = LONGEST_LINE_BYTES, *, name: str = "the file"
) -> Iterator[Chunk | BadLine]:
    """Cut a stream at line ends. A line longer than `longest_bytes` becomes a `BadLine`."""
    number = 1
    held = list[bytes]()
    held_bytes = 0
    skipping = False
    for block in _text_of(blocks, name):
        first_end = block.find(b"\n")
        start = 0
        line_bytes = held_bytes + (len(block) if first_end < 0 else first_end)
        if skipping or line_bytes > longest_bytes:
            if not skipping:
                yield _too_long(number, longest_bytes)
            held = []
            held_bytes = 0
            skipping = first_end < 0
            if skipping:
                continue
            start = first_end + 1
            number = number + 1
        cut = block.rfind(b"\n") + 1
        if cut > start:
            data = b"".join((*held, block[start:cut]))
            yield Chunk(number, data)
            number = number + data.count(b"\n")
            held = []
            held_bytes = 0
            start = cut
        if start < len(block):
            held.append(block[start:])
            held_bytes += len(block) - start
    if held:
        yield Chunk(number, b"".join(held))


def _too_long(number: int, longest_bytes: int) -> BadLine:
    return BadLine(number, f"longer than the maximum of {format_bytes(longest_bytes)}")


def _text_of(blocks: Iterator[bytes], name: str) -> Iterator[bytes]:
    for index, block in enumerate(blocks):
        if index == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UsageError(f"{name} is UTF-16", hint="write it as UTF-8: iconv -f UTF-16 -t UTF-8")
        if index == 0 and _is_binary(block[:_LOOKED_AT]):
            hint = "use JSON lines, optionally compressed with gzip or zstd, or Parquet"
            raise UsageError(f"{name} is not a text file", hint=hint)
        yield block.removeprefix(_BOM) if index == 0 else block


def _is_binary(start: bytes) -> bool:
    """Whether a file begins with more control characters than a text file."""
    return len(start) - len(start.translate(None, _CONTROL)) > max(_MAX_CONTROL, len(start) * _MAX_CONTROL_SHARE)


def check_exists(where: str | Path) -> None:
    """UsageError if a file does not exist; does not open it."""
    try:
        if str(where) != "-":
            Path(where).stat()
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}", hint=_FILE_HINT) from error


class Hashed(NamedTuple):
    """The digest of a file, with the size and modification time that it had."""

    size: int
    mtime_ns: int
    digest: str


def hash_file(where: str | Path) -> Hashed | None:
    """The digest of a file; None for a stream, which could be read only once. UsageError if it cannot be read."""
    try:
        if str(where) == "-" or not stat.S_ISREG(Path(where).stat().st_mode):
            return None
        with Path(where).open("rb") as file:
            info = os.fstat(file.fileno())
            return Hashed(info.st_size, info.st_mtime_ns, hashlib.file_digest(cast(Any, file), "sha256").hexdigest())
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}", hint=_FILE_HINT) from error


@contextmanager
def open_source(
    where: str | Path, hashed: Hashed | None = None, *, parquet: ParquetReader | None = None
) -> Iterator[Source]:
    """Open a file, or stdin for "-"; UsageError if it cannot be read.

    `hashed`: an earlier digest, which is used if the file has not changed since. `parquet`: reads Parquet files, which
    are otherwise refused as binary.
    """
    name = "stdin" if str(where) == "-" else str(where)
    with ExitStack() as stack:
        try:
            file: BinaryIO = sys.stdin.buffer if name == "stdin" else stack.enter_context(Path(where).open("rb"))
            info = os.fstat(file.fileno())
            source = _regular(name, file, info, hashed, parquet) if stat.S_ISREG(info.st_mode) else _stream(name, file)
        except OSError as error:
            raise UsageError(f"cannot read {name}: {error.strerror or error}", hint=_FILE_HINT) from error
        yield source


def _regular(
    name: str, file: BinaryIO, info: os.stat_result, hashed: Hashed | None, parquet: ParquetReader | None
) -> Source:
    """A regular file, whose digest is computed before its first line is read."""
    first = file.read(4)
    file.seek(0)
    if hashed is not None and hashed[:2] == (info.st_size, info.st_mtime_ns):
        digest = hashed.digest
    else:
        digest = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
        file.seek(0)

    def ended() -> str:
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (info.st_size, info.st_mtime_ns):
            raise UsageError(f"{name} changed while it was read", hint="try again when no other process writes to it")
        return digest

    if first == _PARQUET and parquet is not None:
        return Source(name, digest, parquet(name, file), ended)
    return Source(name, digest, chunks(_unpacked(name, file, first), name=name), ended)


def _stream(name: str, file: BinaryIO) -> Source:
    """A stream, whose digest is known at its end."""
    total = hashlib.sha256()
    summing = io.BufferedReader(_Summing(file, total), BLOCK_BYTES)

    def blocks() -> Iterator[bytes]:
        first = summing.peek(4)[:4]
        if first == _PARQUET:
            raise UsageError("Parquet cannot be read from a pipe", hint="give the path of the file")
        yield from _unpacked(name, summing, first)

    return Source(name, None, chunks(blocks(), name=name), total.hexdigest)


class _Summing(io.RawIOBase):
    """Updates a digest with everything read through it."""

    def __init__(self, file: BinaryIO, total: "hashlib._Hash") -> None:
        self._file = file
        self._total = total

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = cast(io.BufferedReader, self._file).read1(len(buffer))
        buffer[: len(data)] = data
        self._total.update(data)
        return len(data)


def _unpacked(name: str, file: IO[bytes], first: bytes) -> Iterator[bytes]:
    if first[:2] == b"\x1f\x8b":
        return _gunzipped(name, file)
    if first == b"\x28\xb5\x2f\xfd":
        return _unzstd(name, file)
    return iter(lambda: file.read(BLOCK_BYTES), b"")


def _gunzipped(name: str, file: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
        try:
            yield from iter(lambda: unpacked.read(BLOCK_BYTES), b"")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{name}: the gzip data is damaged or ends early", hint=_PACK_AGAIN) from error


def _unzstd(name: str, file: IO[bytes]) -> Iterator[bytes]:
    import zstandard  # noqa: PLC0415  slow to import

    frame = None
    try:
        for packed in iter(lambda: file.read(BLOCK_BYTES // 8), b""):
            while packed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data if frame.eof else b""  # noqa: PLW2901
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UsageError(f"{name}: the zstd data is damaged", hint=_PACK_AGAIN) from error
    if frame is not None:
        raise UsageError(f"{name}: the zstd data ends early", hint=_PACK_AGAIN)
