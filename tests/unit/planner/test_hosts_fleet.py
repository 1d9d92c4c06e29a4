"""Fleets from lists of names and from files, and their network link."""

from pathlib import Path

import pytest

from tokenmill.errors import ConfigError, TokenmillError, UnknownMachine, UsageError
from tokenmill.hardware.fleet import fleet_of, parse_link

FILE = """
[[hosts]]
machine = "epyc-9175f"
name = "rack 1"
address = "10.0.0.1"

[[hosts]]
machine = "epyc-7763"
address = "10.0.0.2"
port = 6000

[link]
bandwidth = "25 Gbit/s"
round_trip = "50 us"
"""


@pytest.mark.parametrize(
    ("text", "gb_s", "round_trip_s"),
    [
        ("25Gbit:50us", 3.125, 50e-6),
        ("10 Gbit/s : 0.1 ms", 1.25, 100e-6),
        ("3GB/s:20us", 3.0, 20e-6),
        ("940Mbit:1ms", 0.1175, 1e-3),
        ("1Gbps:0us", 0.125, 0.0),
        ("400Gb:5µs", 50.0, 5e-6),
    ],
)
def test_a_link_is_a_bandwidth_and_a_round_trip(text: str, gb_s: float, round_trip_s: float) -> None:
    link = parse_link(text)
    assert link.gb_s == pytest.approx(gb_s)
    assert link.round_trip_s == pytest.approx(round_trip_s)


@pytest.mark.parametrize("text", ["", "25Gbit", "25Gbit:", ":50us", "fast:50us", "0Gbit:50us", "25Gbit:50", "25:50us"])
def test_a_wrong_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_link(text)
    assert refused.value.hint


def test_hosts_with_commas_are_a_fleet_and_the_first_is_its_head() -> None:
    fleet = fleet_of("epyc-9175f, epyc-7763,epyc-7763", "25Gbit:50us")
    assert fleet is not None
    assert [host.name for host in fleet.hosts] == ["epyc-9175f", "epyc-7763", "epyc-7763-2"]
    assert fleet.head.machine.name == "epyc-9175f"
    assert fleet.link.one_way_s == pytest.approx(25e-6)


def test_one_machine_is_not_a_fleet() -> None:
    assert fleet_of("epyc-9175f", None) is None


def test_a_fleet_file_has_addresses_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE, encoding="utf-8")
    fleet = fleet_of(str(path), None)
    assert fleet is not None
    assert [(host.name, host.endpoint) for host in fleet.hosts] == [
        ("rack-1", "10.0.0.1:50052"),
        ("epyc-7763", "10.0.0.2:6000"),
    ]
    assert fleet.link.round_trip_s == pytest.approx(50e-6)
    other = fleet_of(str(path), "1Gbit:1ms")
    assert other is not None
    assert other.link.gb_s == pytest.approx(0.125)


def test_hosts_behind_one_address_get_ports_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        FILE.replace("10.0.0.1", "127.0.0.1").replace('"10.0.0.2"\nport = 6000', '"127.0.0.1"'), encoding="utf-8"
    )
    fleet = fleet_of(str(path), None)
    assert fleet is not None
    assert [host.endpoint for host in fleet.hosts] == ["127.0.0.1:50052", "127.0.0.1:50053"]


@pytest.mark.parametrize(
    ("before", "after", "error", "value"),
    [
        ("10.0.0.2", "0.0.0.0", ConfigError, "0.0.0.0"),
        ("10.0.0.2", "8.8.8.8", ConfigError, "8.8.8.8"),
        ("round_trip", "roundtrip", ConfigError, "roundtrip"),
        ("50 us", "soon", ConfigError, "soon"),
        ("[link]\n", "[lonk]\n", ConfigError, "lonk"),
        ("port = 6000", "port = 70000", ConfigError, "70000"),
        ('"epyc-7763"', '"nothing-like-it"', UnknownMachine, "nothing-like-it"),
    ],
)
def test_a_wrong_fleet_file_is_refused(
    tmp_path: Path, before: str, after: str, error: type[TokenmillError], value: str
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE.replace(before, after), encoding="utf-8")
    with pytest.raises(error, match=value) as refused:
        fleet_of(str(path), None)
    assert refused.value.hint


@pytest.mark.parametrize(("named", "link"), [("epyc-9175f,epyc-7763", None), ("epyc-9175f", "25Gbit:50us")])
def test_hosts_and_link_belong_together(named: str, link: str | None) -> None:
    with pytest.raises(UsageError):
        fleet_of(named, link)


def test_a_fleet_file_without_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE.partition("[link]")[0], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"\[link\]"):
        fleet_of(str(path), None)
