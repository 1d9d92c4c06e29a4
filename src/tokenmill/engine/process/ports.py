"""TCP ports of this machine: finds free ports and the processes that listen on others."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tokenmill.errors import EngineError


@dataclass(frozen=True, slots=True)
class PortHolder:
    """A process that listens on a port; `pid` is None if it belongs to another user."""

    pid: int | None
    name: str | None

    def __str__(self) -> str:
        """Description for messages."""
        return "another user's process" if self.pid is None else f"process {self.pid} ({self.name or 'unknown'})"


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, wanted: int) -> int:
    """Return the wanted port if it is free, else any free port; EngineError if the host is not a local address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise EngineError(f"cannot listen on {host}:{wanted}: {error}") from error
    failure: OSError | None = None
    for port in dict.fromkeys((wanted, 0)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as servers do: connections in TIME_WAIT do not block the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port))
                return int(probe.getsockname()[1])
            except OSError as error:
                failure = error
    raise EngineError(f"cannot listen on any port of {host}: {failure}", hint="use an address of this machine")


def holder_of(port: int) -> PortHolder | None:
    """Return the process that listens on a TCP port of this machine; None if there is no such process."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # /proc/net may be hidden
        return None
    sockets = [
        each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    ]
    if not sockets:
        return None
    pid = next((each.pid for each in sockets if each.pid is not None), None)
    name = None
    if pid is not None:
        with suppress(psutil.Error):
            name = psutil.Process(pid).name()
    return PortHolder(pid, name)
