"""Receives a multipart/form-data upload: streamed to disk within limits, and hashed on the way.

Memory holds only the latest piece. The client's file name is a label, never a path.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.jobs.store.sqlite_errors import unusable
from tokenmill.units import KIB, MIB, format_bytes

FIELD = "file"
LONGEST_NAME = 255
MOST_FIELD_BYTES = KIB  # for fields such as purpose
_BESIDE_BYTES = 64 * KIB  # for boundaries and fields around the file
_WRITE_BYTES = MIB
_MOST_PARTS = 16


@dataclass(slots=True)
class Upload:
    """The received upload."""

    filename: str
    bytes: int
    sha256: str
    fields: dict[str, str] = field(default_factory=dict)


async def receive(request: Request, into: Path, *, most_bytes: int, timeout_s: float) -> Upload:
    """Write the form's file to a path; it is on disk when this returns. After a Fault, the path does not exist.

    `timeout_s` limits the wait for each piece, not for the whole upload.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise GatewayFault(
            "a file comes as multipart/form-data with a boundary", status=415, code="unsupported_media_type"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most_bytes + _BESIDE_BYTES:
        raise _too_large(most_bytes)
    try:
        with into.open("xb") as file:
            form = _Form(options[b"boundary"], most_bytes)
            await _pour(request, form, file, timeout_s)
            upload = form.ended()
            await asyncio.to_thread(_sync, file)
            return upload
    except OSError as error:
        into.unlink(missing_ok=True)
        raise unusable(into.parent, error) from error
    except BaseException:
        into.unlink(missing_ok=True)
        raise


async def _pour(request: Request, form: "_Form", file: BinaryIO, timeout_s: float) -> None:
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(timeout_s):
                piece = await anext(stream, None)
            if piece is None:
                break
            form.feed(piece)
            if form.waiting_bytes >= _WRITE_BYTES:
                await asyncio.to_thread(form.write, file)
        await asyncio.to_thread(form.write, file)
    except TimeoutError:
        raise GatewayFault(
            f"nothing more of the file came within {timeout_s:g} s", status=408, code="body_timeout", kind="size"
        ) from None
    except ClientDisconnect:
        raise GatewayFault("the client left in the middle of its file", code="client_left") from None
    finally:
        await stream.aclose()


class _Form:
    """Incremental form parser; pieces of the file wait for `write`."""

    def __init__(self, boundary: bytes, most_bytes: int) -> None:
        self._most = most_bytes
        self._sum = hashlib.sha256()
        self._size = 0
        self._pieces: list[bytes] = []
        self.waiting_bytes = 0
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._part: Callable[[bytes], None] = self._nowhere
        self._parts = 0
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_part_data": lambda data, start, end: self._part(data[start:end]),
                    "on_header_field": lambda data, start, end: self._head(self._header, data[start:end]),
                    "on_header_value": lambda data, start, end: self._head(self._value, data[start:end]),
                    "on_header_end": self._header_ended,
                    "on_headers_finished": self._named,
                    "on_end": self._over,
                },
            )
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def feed(self, piece: bytes) -> None:
        """Parse more data."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def write(self, file: BinaryIO) -> None:
        """Write the parsed pieces to the file; blocks."""
        pieces = self._pieces
        self._pieces = []
        self.waiting_bytes = 0
        for piece in pieces:
            self._sum.update(piece)
            file.write(piece)

    def ended(self) -> Upload:
        """Finish parsing."""
        if not self._complete:
            raise _malformed("it ends in the middle")
        if self._filename is None:
            raise GatewayFault(f"the form has no file in a field {FIELD!r}", param=FIELD)
        try:
            fields = {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError:
            raise _malformed("a field is not UTF-8 text") from None
        return Upload(self._filename, self._size, self._sum.hexdigest(), fields)

    def _begin(self) -> None:
        self._disposition, self._parts = b"", self._parts + 1
        if self._parts > _MOST_PARTS:
            raise _malformed(f"it has more than {_MOST_PARTS} parts")

    def _head(self, into: bytearray, data: bytes) -> None:
        into += data
        if len(into) > MOST_FIELD_BYTES * 4:
            raise _malformed("a header is too long")

    def _header_ended(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _named(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == FIELD and b"filename" in options:
            if self._filename is not None:
                raise GatewayFault("one file at a time", param=FIELD)
            self._filename, self._part = label(options[b"filename"].decode(errors="replace")), self._of_file
        elif b"filename" in options:
            raise GatewayFault(f"the file belongs into the field {FIELD!r}, not {name[:60]!r}", param=FIELD)
        else:
            if name in self._fields:
                raise GatewayFault(f"{name[:60]!r} is given twice", param=name[:60])
            value = self._fields[name] = bytearray()
            self._part = lambda data: self._of_field(name, value, data)

    def _nowhere(self, data: bytes) -> None:
        raise _malformed("it has no parts")

    def _of_file(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            raise _too_large(self._most)
        self._pieces.append(data)
        self.waiting_bytes += len(data)

    def _of_field(self, name: str, value: bytearray, data: bytes) -> None:
        value += data
        if len(value) > MOST_FIELD_BYTES:
            raise GatewayFault(f"{name[:60]!r} is too long", param=name[:60])

    def _over(self) -> None:
        self._complete = True


def label(name: str) -> str:
    """The client's file name, made safe to display: no folders, no terminal control characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable()).strip()
    return shown[:LONGEST_NAME] or "file"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _too_large(most_bytes: int) -> GatewayFault:
    return GatewayFault(
        f"the file is larger than {format_bytes(most_bytes)}",
        status=413,
        code="file_too_large",
        kind="size",
        hint="gateway.max_file_bytes sets the limit",
    )


def _malformed(why: str) -> GatewayFault:
    return GatewayFault(f"the form cannot be read: {why}", code="invalid_form", kind="json")
