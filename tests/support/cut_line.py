"""A connection to a server's socket that can be cut at one end without the other end noticing."""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_ONCE = struct.pack("ii", 1, 0)  # close() sends a reset


class Line:
    """A port here that leads to a socket in a folder."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends = list[tuple[socket.socket, socket.socket]]()  # ours to the client, ours to the server
        self._cut = set[socket.socket]()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def cut(self) -> int:
        """Reset all clients' ends; how many. What leads to the server stays open, and silent."""
        count = 0
        for client, _ in self._ends:
            if client not in self._cut:
                self._cut.add(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                client.shutdown(socket.SHUT_RD)  # wakes the thread that waits for it
                client.close()
                count += 1
        return count

    def close(self) -> None:
        self._left.set()
        self._thread.join()
        for each in (self._listener, *(end for ends in self._ends for end in ends)):
            each.close()

    def _serve(self) -> None:
        while not self._left.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, server = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            self._ends.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        """Copy bytes one way. A closed end is passed on, a cut is not."""
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            if source not in self._cut:
                target.shutdown(socket.SHUT_WR)


@contextmanager
def line(target: Path) -> Iterator[Line]:
    """One that ends with the test."""
    one = Line(target)
    try:
        yield one
    finally:
        one.close()
