"""Several hosts and the network between them: names separated by commas, or a file with `[[hosts]]` and `[link]`.

The first host is the head host, which has the model's files and serves requests. All hosts are connected with the same
bandwidth and round-trip time. Does not access the network.
"""

import ipaddress
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.decode import decode
from tokenmill.errors import ConfigError, UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine

RPC_PORT = 50052  # llama.cpp's default
LINK_EXAMPLE = "25Gbit:50us"

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(bit|b)(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|µs|ms|s)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The network between hosts, with the bandwidth of iperf3 and the round trip of ping."""

    gb_s: float  # per direction
    round_trip_s: float

    @property
    def one_way_s(self) -> float:
        """Latency of an empty message."""
        return self.round_trip_s / 2


@dataclass(frozen=True, slots=True)
class FleetHost:
    """One machine of a fleet and its address."""

    name: str  # also the prefix of its tiers: NAME/dram
    machine: Machine
    address: str
    port: int = RPC_PORT  # port of llama.cpp's RPC server

    @property
    def endpoint(self) -> str:
        """Address of its RPC server."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts in the given order, the head host first."""

    hosts: tuple[FleetHost, ...]
    link: NetworkLink

    @property
    def head(self) -> FleetHost:
        """The head host, which has the model's files and serves requests."""
        return self.hosts[0]

    @property
    def name(self) -> str:
        """Display name of the fleet."""
        return " + ".join(host.name for host in self.hosts)


@dataclass(frozen=True, slots=True)
class _HostEntry:
    """One `[[hosts]]` table."""

    machine: str  # as for --machine; paths are relative to the fleet file
    name: str | None = None
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class _LinkEntry:
    """The `[link]` table."""

    bandwidth: str
    round_trip: str


@dataclass(frozen=True, slots=True)
class _FleetFile:
    """A whole fleet file."""

    hosts: tuple[_HostEntry, ...]
    link: _LinkEntry | None = None


def fleet_of(named: str, link: str | None) -> Fleet | None:
    """The fleet given by `--machine` and `--link`; None if they name a single machine.

    Raises `UsageError` for wrong options and `ConfigError` for a wrong fleet file.
    """
    parts = [part.strip() for part in named.split(",") if part.strip()]
    if len(parts) > 1:
        if link is None:
            raise UsageError("several hosts need a network link", hint=f"add --link, for example --link {LINK_EXAMPLE}")
        return _fleet([_HostEntry(part) for part in parts], parse_link(link), Path())
    path = Path(named)
    with suppress(RuntimeError):  # the home of an unknown user
        path = path.expanduser()
    file = _fleet_file(path) if named.endswith(".toml") or "/" in named else None
    if file is None:
        if link is not None:
            raise UsageError(
                "--link needs several hosts",
                hint=f"use --machine head.toml,worker.toml --link {LINK_EXAMPLE}, or omit --link",
            )
        return None
    network = parse_link(link) if link is not None else _link_of(file.link, path)
    return _fleet(file.hosts, network, path.parent)


def parse_link(text: str) -> NetworkLink:
    """Parse `25Gbit:50us`: bandwidth of one direction and round-trip time. Raises `UsageError`."""
    rate, colon, time = text.partition(":")
    if not colon:
        raise UsageError(f"--link {text!r} lacks a bandwidth or a round trip", hint=f"for example {LINK_EXAMPLE}")
    return NetworkLink(_rate(rate), _time(time))


def _rate(text: str) -> float:
    found = _RATE.fullmatch(text.strip())
    gb_s = float(found[1]) * _BITS[found[2].lower()] / 1e9 if found else 0.0
    if found is None or gb_s <= 0:
        raise UsageError(
            f"{text.strip()!r} is not a bandwidth", hint="use a form such as 25Gbit, 100 Gbit/s, 940Mbit or 3 GB/s"
        )
    bits = found[3].lower() == "bit" or found[3] == "b"
    return gb_s / 8 if bits else gb_s


def _time(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{text.strip()!r} is not a round-trip time", hint="use the time that ping reports, such as 50us or 0.2ms"
        )
    return float(found[1]) * _SECONDS[found[2].lower()]


def _fleet_file(path: Path) -> _FleetFile | None:
    """Read a file with `[[hosts]]`; None for other files, which are treated as machine files."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return decode(_FleetFile, data, where=str(path)) if "hosts" in data else None


def _link_of(entry: _LinkEntry | None, path: Path) -> NetworkLink:
    if entry is None:
        raise ConfigError(
            f"{path}: the fleet has no [link]",
            hint='add [link] with bandwidth = "25 Gbit/s" and round_trip = "50 us", or use --link',
        )
    try:
        return NetworkLink(_rate(entry.bandwidth), _time(entry.round_trip))
    except UsageError as error:
        raise ConfigError(f"{path}: [link]: {error.message}", hint=error.hint) from error


def _fleet(entries: list[_HostEntry] | tuple[_HostEntry, ...], link: NetworkLink, folder: Path) -> Fleet:
    if len(entries) < 2:
        raise UsageError("a fleet needs at least two hosts", hint="add a host, or pass the single one to --machine")
    hosts: list[FleetHost] = []
    taken: set[tuple[str, int]] = set()
    for entry in entries:
        machine = find(_resolved(entry.machine, folder))
        name = _unused(entry.name or machine.name, {host.name for host in hosts})
        address = entry.address or name
        _check_private(name, address)
        port = entry.port or next(port for port in range(RPC_PORT, 65536) if (address, port) not in taken)
        if not 0 < port < 65536:
            raise ConfigError(f"host {name}: port must be 1-65535 (got {port})", hint=f"the default is {RPC_PORT}")
        if (address, port) in taken:
            raise ConfigError(
                f"host {name}: another host already uses {address}:{port}", hint="give each host its own port"
            )
        taken.add((address, port))
        hosts.append(FleetHost(name, machine, address, port))
    return Fleet(tuple(hosts), link)


def _resolved(machine: str, folder: Path) -> str:
    path = Path(machine)
    if machine.endswith(".toml") and not path.is_absolute() and not machine.startswith("~"):
        return str(folder / path)
    return machine


def _unused(name: str, taken: set[str]) -> str:
    """A unique name that is valid in tier names, with a number appended on conflict."""
    plain = "".join(letter if _NAME.fullmatch(f"a{letter}") else "-" for letter in name).strip("-._") or "host"
    count = 1
    while (found := plain if count == 1 else f"{plain}-{count}") in taken:
        count += 1
    return found


def _check_private(name: str, address: str) -> None:
    """Require a private address, because llama.cpp's RPC server and Ray do not authenticate clients."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return  # host names are not resolved
    if found.is_unspecified or found.is_global:
        raise ConfigError(
            f"host {name}: {address} is a public address, and anyone who reaches it can run code on the host",
            hint="use an address of a private network or a tunnel, such as 10.0.0.2",
        )
