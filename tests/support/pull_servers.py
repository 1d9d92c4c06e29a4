"""Real HTTP servers on loopback for downloads: files with ranges and faults, a package index, a hub."""

import base64
import hashlib
import json
import re
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "5f3c0b1d9e7a4c2f8b6d0e1a2c3b4d5e6f708192"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass(slots=True)
class Shelf:
    """Files of a server, its faults, and the requests it got."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)  # path -> one word for each of its next answers
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # path -> headers of its answers
    gate: str | None = None  # the word that Authorization or User-Agent must hold
    etags: bool = True
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def ranges(self, path: str) -> list[str]:
        """The Range header of every GET of one path."""
        return [asked.range for asked in self.asked if asked.path == path and asked.method == "GET"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shelf = shelf

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients hang up in these tests
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        shelf, path = self.server.shelf, self.path.partition("?")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        shelf.asked.append(Asked(self.command, path, headers))
        if shelf.gate and shelf.gate not in headers.get("authorization", "") + headers.get("user-agent", ""):
            return self._answer(401, b"who are you", {"WWW-Authenticate": 'Basic realm="test"'})
        waiting = shelf.faults.get(path, [])
        fault = waiting.pop(0) if waiting and self.command == "GET" else ""
        if fault.isdigit():
            return self._answer(int(fault), b"{}", shelf.headers.get(path, {}))
        if path not in shelf.files:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return self._file(path, shelf.files[path], headers, fault)

    def _file(self, path: str, body: bytes, asked: Mapping[str, str], fault: str) -> None:
        shelf = self.server.shelf
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        extra = dict(shelf.headers.get(path, {})) | ({"ETag": etag} if shelf.etags else {})
        extra["Accept-Ranges"] = "bytes"
        size, match = len(body), re.fullmatch(r"bytes=(\d+)-(\d*)", asked.get("range", ""))
        stale = "if-range" in asked and asked["if-range"] != etag
        if match is None or stale or fault == "ignore-range":
            return self._answer(200, body, extra, cut=fault)
        start, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
        if start >= size:
            return self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
        if fault == "wrong-range":
            start = 0
        return self._answer(
            206, body[start : end + 1], extra | {"Content-Range": f"bytes {start}-{end}/{size}"}, cut=fault
        )

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut: str = "") -> None:
        path = self.path.partition("?")[0]
        self.send_response(status)
        for name, value in ({"Content-Type": "text/html"} | dict(headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut.startswith("cut:"):
            body = body[: int(cut.removeprefix("cut:"))]
            self.close_connection = True
        try:
            if cut.startswith("stall:"):  # send so much, then nothing until the client has gone
                self.wfile.write(body[: int(cut.removeprefix("stall:"))])
                self.connection.recv(1)
                return
            if status in (200, 206):  # counted first, because the client may be done before this thread continues
                self.server.shelf.sent_bytes[path] = self.server.shelf.sent_bytes.get(path, 0) + len(body)
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@contextmanager
def serve(shelf: Shelf) -> Iterator[Shelf]:
    """Run a server in a thread until the block is left."""
    server = _Server(shelf)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    shelf.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield shelf
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_wheel(path: Path, name: str, content: bytes, member: str) -> Path:
    """A wheel that holds one file."""
    info = f"{name}-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip('=')},{len(body)}"
        for file, body in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, body in files.items():
            archive.writestr(file, body)
    return path


def stock_index(shelf: Shelf, wheel: Path, *, metadata: bool = True) -> str:
    """Put a wheel into a package index; returns the path of the wheel on the server."""
    body, name = wheel.read_bytes(), wheel.name.partition("-")[0]
    path = f"/files/{wheel.name}"
    shelf.files[path] = body
    offered = ""
    if metadata:
        with zipfile.ZipFile(wheel) as archive:
            shelf.files[f"{path}.metadata"] = archive.read(f"{name}-1.0.dist-info/METADATA")
        offered = f' data-core-metadata="sha256={hashlib.sha256(shelf.files[f"{path}.metadata"]).hexdigest()}"'
    link = f'<a href="{path}#sha256={hashlib.sha256(body).hexdigest()}"{offered}>{wheel.name}</a>'
    shelf.files[f"/simple/{name}/"] = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    return path


def stock_hub(shelf: Shelf, repo: str, files: Mapping[str, bytes]) -> None:
    """Put a repository into a hub."""
    siblings = []
    for name, body in files.items():
        sha256 = hashlib.sha256(body).hexdigest()
        siblings.append(
            {
                "rfilename": name,
                "size": len(body),
                "blobId": sha256[:40],
                "lfs": {"sha256": sha256, "size": len(body), "pointerSize": 130},
            }
        )
        path = f"/{repo}/resolve/{COMMIT}/{name}"
        shelf.files[path] = body
        shelf.headers[path] = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(body)), "X-Linked-Etag": sha256}
    about = {
        "id": repo,
        "modelId": repo,
        "sha": COMMIT,
        "private": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }
    shelf.files[f"/api/models/{repo}"] = json.dumps(about).encode()
    shelf.headers[f"/api/models/{repo}"] = {"Content-Type": "application/json"}
