"""Ports of this machine: which is free, and who listens on one that is not."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import EngineError

_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port; without a number where it is another user's."""

    pid: int | None
    name: str | None

    def __str__(self) -> str:
        """For a message."""
        return "another user's process" if self.pid is None else f"process {self.pid} ({self.name or 'no name'})"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, wanted: int) -> int:
    """The wanted port if nobody has it, else any free one; 0 wants any."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise EngineError(f"{host}:{wanted} is no address to listen on: {error}") from error
    failure: OSError | None = None
    for port in dict.fromkeys((wanted, 0)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as servers set it: a port whose last connections are still closing is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port))
                return int(probe.getsockname()[1])
            except OSError as error:
                failure = error
    raise EngineError(f"no port of {host} can be used: {failure}", hint="is it an address of this machine?")


def holder_of(port: int) -> Holder | None:
    """Who listens on a port of this machine; None: nobody."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in listening(_text(_PROC / "net" / table), port)}
    if not inodes:
        return None
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and any(inode in inodes for inode in _sockets(folder)):
            return Holder(int(folder.name), _text(folder / "comm").strip() or None)
    return Holder(None, None)


def listening(table: str, port: int) -> Iterator[int]:
    """Inodes of the sockets that listen on a port, out of /proc/net/tcp."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            yield int(fields[9])


def _sockets(process: Path) -> Iterator[int]:
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
