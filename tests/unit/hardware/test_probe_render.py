"""Output of `tokenmill probe` for captured machines."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tokenmill.cli.planning.probe import render
from tokenmill.hardware import catalog
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Machine, Measurements, Rate
from tokenmill.hardware.probe import probe

Captured = Callable[[str], Host]


def shown(machine: Machine) -> str:
    console = Console(file=StringIO(), width=80, highlight=False)
    for part in render(machine):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("machine", "phrases"),
    [
        (
            "epyc-dual",
            [
                "2 sockets, 128 cores, 2 threads each, L3 512.0 MiB",
                "DDR4, 3200 MT/s, 16 channels, 410 GB/s nominal",
                "16 modules of 64.0 GiB",
                "CPUs 64-127,192-255",
                "distances 10 32, 32 10",
                "memory: 900.0 GiB",
                "GPUs        none",
            ],
        ),
        (
            "eight-3090",
            ["GPUs 1 and 5: 4 links, 56.2 GB/s each way", "936 GB/s   1.0 x16  4.0 x16  350 W", "128.0 GiB, 0 B used"],
        ),
        (
            "optane-memory-mode",
            ["96.0 GiB, as the cache of PMem", "6 modules, 758.5 GiB, Memory Mode", "754.6 GiB is the system's memory"],
        ),
        (
            "pmem-app-direct",
            [
                "namespace0.0: fsdax, 496.1 GiB, /dev/pmem0, mounted at /mnt/pmem0",
                "notes:",
                "sudo dmidecode -t 17",
            ],
        ),
        ("this-vm", ["a virtual", "modules, channels and speed unknown"]),
        ("desktop", ["Radeon RX 7900", "Raphael", "unknown"]),
    ],
)
def test_text_of_captured_machines(machine: str, phrases: list[str], captured: Captured) -> None:
    text = shown(probe(Path("/home"), host=captured(machine)))
    for phrase in phrases:
        assert phrase in text


def test_names_with_brackets_are_not_markup(captured: Captured) -> None:
    machine = probe(host=captured("desktop"))
    gpu = replace(machine.gpus[0], name="AMD Navi 31 [Radeon RX 7900 XT]")
    assert "[Radeon" in shown(replace(machine, gpus=(gpu,)))


def test_measured_and_nominal_rates_are_shown_together(captured: Captured) -> None:
    machine = probe(Path("/home"), host=captured("eight-3090"))
    rates = (
        Rate("dram", 120.0, 16, {8: 90.0, 16: 120.0}),
        Rate("disk", 3.2),
        Rate("gpu0", 850.0),
        Rate("dram->gpu0", 25.0),
    )
    text = shown(replace(machine, measured=Measurements("2026-01-01T00:00:00+00:00", rates)))
    assert "dram         188 GB/s   120 GB/s   64 %  8: 90.0, 16: 120.0" in text
    assert "91 %" in text  # 850 of 936
    assert "79 %" in text  # 25 of PCIe 4.0 x16
    assert "reads 3.2 GB/s" in text
    assert "probe --measure" not in text


def test_unknown_facts_of_a_catalogue_machine_are_shown_as_unknown() -> None:
    text = shown(catalog.find("epyc-7532-8x3090"))
    assert "limits      none known" in text
    assert "unlimited" not in text
    assert "936 GB/s   unknown   4.0 x?" in text  # the generation is known, the width is not


@pytest.mark.parametrize("machine", catalog.load_all(), ids=lambda machine: machine.name)
def test_every_catalogue_machine_fits_80_columns(machine: Machine) -> None:
    assert max(map(len, shown(machine).splitlines())) <= 80
