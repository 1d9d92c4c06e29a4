"""Ports of this machine: which is free, and who listens on one that is not."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tokenmill.errors import EngineError


@dataclass(frozen=True, slots=True)
class PortHolder:
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
    """Return the wanted port if it is free, else any free port; 0 means any."""
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
