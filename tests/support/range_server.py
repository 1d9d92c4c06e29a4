"""A real HTTP server on loopback that answers range requests, and can misbehave."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class RangeServer(ThreadingHTTPServer):
    """Serves one folder; `behaviour` is how it breaks, `requests` is what it was asked."""

    daemon_threads = True

    def __init__(self, folder: Path, behaviour: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.behaviour = folder, behaviour
        self.requests: list[str] = []
        self.bytes_sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range", "")
        server.requests.append(f"{self.path} {asked}")
        if server.behaviour.isdigit():
            return self._answer(int(server.behaviour), b"no")
        if server.behaviour == "redirect" and not self.path.startswith("/cdn/"):
            self.send_response(302)
            self.send_header("Location", f"/cdn{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        path = server.folder / self.path.removeprefix("/cdn").lstrip("/").partition("?")[0]
        if not path.is_file():
            return self._answer(404, b"not here")
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        if match is None or server.behaviour == "ignores-ranges":
            return self._answer(200, b"x" * min(size, 1000))
        start, end = int(match[1]), min(int(match[2]), size - 1)
        if start >= size:
            return self._answer(416, b"")
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(end - start + 1)
        if server.behaviour == "too-much":
            body += b"x" * 100_000
        total = "*" if server.behaviour == "no-length" else str(size)
        return self._answer(206, body, {"Content-Range": f"bytes {start}-{end}/{total}"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.server.bytes_sent += len(body)  # first, because the client may be done before this thread continues
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@contextmanager
def range_server(folder: Path, behaviour: str = "") -> Iterator[RangeServer]:
    server = RangeServer(folder, behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
