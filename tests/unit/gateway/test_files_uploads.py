"""Multipart uploads, with data cut at arbitrary places."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from tokenmill.gateway.batches import uploads
from tokenmill.gateway.batches.uploads import Upload, label, receive
from tokenmill.gateway.http.faults import GatewayFault

BOUNDARY = "x0x"


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def send(
    body: bytes,
    into: Path,
    *,
    pieces: int = 7,
    max_bytes: int = 1000,
    headers: dict[str, str] | None = None,
    hangs: bool = False,
    leaves: bool = False,
) -> Upload:
    """A request whose body comes in pieces."""
    given_headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", **(headers or {})}
    left = [body[at : at + pieces] for at in range(0, len(body), pieces)] or [b""]

    async def receive_message() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or hangs or leaves}
        if leaves:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/files",
        "headers": [(name.encode(), value.encode()) for name, value in given_headers.items()],
    }
    timeout_s = 0.05 if hangs else 10.0
    return asyncio.run(receive(Request(scope, receive_message), into, max_bytes=max_bytes, timeout_s=timeout_s))


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=200), pieces=st.integers(1, 120), later=st.booleans())
def test_every_byte_comes_through(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, pieces: int, later: bool
) -> None:
    data = data.replace(BOUNDARY.encode(), b"")
    into = tmp_path_factory.mktemp("up") / "f"
    fields = [part("file", data, "jobs.jsonl"), part("purpose", b"batch")]
    came = send(form(*(reversed(fields) if later else fields)), into, pieces=pieces)
    assert into.read_bytes() == data
    assert came == Upload("jobs.jsonl", len(data), hashlib.sha256(data).hexdigest(), {"purpose": "batch"})


def test_large_files_go_to_the_disk_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_WRITE_BYTES", 100)
    data = bytes(range(256)) * 20
    came = send(form(part("file", data, "a"), part("purpose", b"batch")), tmp_path / "f", pieces=64, max_bytes=10_000)
    assert (tmp_path / "f").read_bytes() == data
    assert came.sha256 == hashlib.sha256(data).hexdigest()


FILE = part("file", b"x" * 20, "f")


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (form(part("file", b"x" * 1001, "f")), 413, "file_too_large", "larger"),
        (FILE, 400, "invalid_form", "incomplete"),
        (b"", 400, "invalid_form", "incomplete"),
        (b"no form at all" * 9, 400, "invalid_form", "form"),
        (form(part("purpose", b"batch")), 400, "invalid_request", "file"),
        (form(part("file", b"no file name")), 400, "invalid_request", "file"),
        (form(FILE, FILE), 400, "invalid_request", "one"),
        (form(part("other", b"x", "f")), 400, "invalid_request", "other"),
        (form(FILE, part("purpose", b"a"), part("purpose", b"b")), 400, "invalid_request", "purpose"),
        (form(FILE, part("purpose", b"p" * 2000)), 400, "invalid_request", "long"),
        (form(FILE, part("purpose", b"\xff")), 400, "invalid_form", "UTF-8"),
        (form(*(part(f"n{number}", b"") for number in range(40))), 400, "invalid_form", "parts"),
    ],
)
def test_bad_forms_leave_nothing(tmp_path: Path, body: bytes, status: int, code: str, words: str) -> None:
    with pytest.raises(GatewayFault, match=words) as caught:
        send(body, tmp_path / "f", pieces=50, max_bytes=1000)
    assert (caught.value.answer_status, caught.value.code) == (status, code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-length": "900000"}, 413),
    ],
)
def test_bad_headers(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    with pytest.raises(GatewayFault) as caught:
        send(form(FILE), tmp_path / "f", headers=headers)
    assert caught.value.answer_status == status


def test_a_client_that_stops_sending(tmp_path: Path) -> None:
    with pytest.raises(GatewayFault) as caught:
        send(FILE, tmp_path / "f", hangs=True)
    assert (caught.value.answer_status, caught.value.code) == (408, "body_timeout")
    with pytest.raises(GatewayFault) as caught:
        send(FILE, tmp_path / "f", leaves=True)
    assert caught.value.code == "client_left"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("jobs.jsonl", "jobs.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\jobs\\a.jsonl", "a.jsonl"),
        ("/", "file"),
        ("", "file"),
        ("a\x1b[31mb\n", "a[31mb"),
        ("é" * 300, "é" * 255),
    ],
)
def test_names_are_labels(name: str, shown: str) -> None:
    assert label(name) == shown
