"""Receives multipart/form-data uploads: streams the file to disk within limits and hashes it.

About 1 MiB is kept in memory. The client's file name is a label and never used as a path.
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
MAX_NAME_CHARS = 255
MAX_FIELD_BYTES = KIB  # for fields such as purpose
_FORM_OVERHEAD_BYTES = 64 * KIB  # for boundaries and fields around the file
_WRITE_BYTES = MIB
_MAX_PARTS = 16


@dataclass(slots=True)
class Upload:
    """A received upload."""

    filename: str
    bytes: int
    sha256: str
    fields: dict[str, str] = field(default_factory=dict)


async def receive(request: Request, into: Path, *, max_bytes: int, timeout_s: float) -> Upload:
    """Write the uploaded file to `into`; its content is on disk on return. After an error, `into` does not exist.

    `timeout_s` limits the wait for each piece, not for the whole upload.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise GatewayFault(
            "the content type must be multipart/form-data with a boundary", status=415, code="unsupported_media_type"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes + _FORM_OVERHEAD_BYTES:
        raise _too_large(max_bytes)
    try:
        with into.open("xb") as file:
            form = _Form(options[b"boundary"], max_bytes)
            await _stream(request, form, file, timeout_s)
            upload = form.ended()
            await asyncio.to_thread(_sync, file)
            return upload
    except OSError as error:
        into.unlink(missing_ok=True)
        raise unusable(into.parent, error) from error
    except BaseException:
        into.unlink(missing_ok=True)
        raise


async def _stream(request: Request, form: "_Form", file: BinaryIO, timeout_s: float) -> None:
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
            f"no data of the file arrived for {timeout_s:g} s", status=408, code="body_timeout", kind="size"
        ) from None
    except ClientDisconnect:
        raise GatewayFault("the client disconnected during the upload", code="client_left") from None
    finally:
        await stream.aclose()


class _Form:
    """Incremental form parser; pieces of the file are buffered until `write`."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self._most = max_bytes
        self._sum = hashlib.sha256()
        self._size = 0
        self._pieces: list[bytes] = []
        self.waiting_bytes = 0
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._part: Callable[[bytes], None] = self._outside_parts
        self._parts = 0
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_part_data": lambda data, start, end: self._part(data[start:end]),
                    "on_header_field": lambda data, start, end: self._append_header(self._header, data[start:end]),
                    "on_header_value": lambda data, start, end: self._append_header(self._value, data[start:end]),
                    "on_header_end": self._header_ended,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._finished,
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
        """Write the buffered pieces to the file; blocks."""
        pieces = self._pieces
        self._pieces = []
        self.waiting_bytes = 0
        for piece in pieces:
            self._sum.update(piece)
            file.write(piece)

    def ended(self) -> Upload:
        """The upload, after all data; raises GatewayFault if the form is incomplete."""
        if not self._complete:
            raise _malformed("it is incomplete")
        if self._filename is None:
            raise GatewayFault(f"the form has no file in the field {FIELD!r}", param=FIELD)
        try:
            fields = {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError:
            raise _malformed("a field is not UTF-8 text") from None
        return Upload(self._filename, self._size, self._sum.hexdigest(), fields)

    def _begin(self) -> None:
        self._disposition, self._parts = b"", self._parts + 1
        if self._parts > _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS} parts")

    def _append_header(self, into: bytearray, data: bytes) -> None:
        into += data
        if len(into) > MAX_FIELD_BYTES * 4:
            raise _malformed("a header is too long")

    def _header_ended(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == FIELD and b"filename" in options:
            if self._filename is not None:
                raise GatewayFault("the form has more than one file", param=FIELD)
            self._filename, self._part = label(options[b"filename"].decode(errors="replace")), self._append_file
        elif b"filename" in options:
            raise GatewayFault(f"the file must be in the field {FIELD!r}, not {name[:60]!r}", param=FIELD)
        else:
            if name in self._fields:
                raise GatewayFault(f"the field {name[:60]!r} is given twice", param=name[:60])
            value = self._fields[name] = bytearray()
            self._part = lambda data: self._append_field(name, value, data)

    def _outside_parts(self, data: bytes) -> None:
        raise _malformed("it has no parts")

    def _append_file(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            raise _too_large(self._most)
        self._pieces.append(data)
        self.waiting_bytes += len(data)

    def _append_field(self, name: str, value: bytearray, data: bytes) -> None:
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise GatewayFault(f"the field {name[:60]!r} is too long", param=name[:60])

    def _finished(self) -> None:
        self._complete = True


def label(name: str) -> str:
    """The client's file name without folders and control characters, safe to display."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable()).strip()
    return shown[:MAX_NAME_CHARS] or "file"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _too_large(max_bytes: int) -> GatewayFault:
    return GatewayFault(
        f"the file is larger than {format_bytes(max_bytes)}",
        status=413,
        code="file_too_large",
        kind="size",
        hint="gateway.max_file_bytes sets the limit",
    )


def _malformed(why: str) -> GatewayFault:
    return GatewayFault(f"the form cannot be read: {why}", code="invalid_form", kind="json")
