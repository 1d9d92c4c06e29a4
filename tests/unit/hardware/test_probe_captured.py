"""The whole probe on the machines captured in tests/data/hardware."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.hardware import catalog, machine_file
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Machine, NvLink
from tokenmill.hardware.probe import probe
from tokenmill.units import GIB, KIB, MIB

Captured = Callable[[str], Host]

MACHINES = ("epyc-dual", "desktop", "eight-3090", "optane-memory-mode", "pmem-app-direct", "this-vm", "h200-vm")


def notes_on(machine: Machine, about: str) -> str:
    return " ".join(note.text for note in machine.notes if note.about == about)


def test_dual_socket_epyc(captured: Captured) -> None:
    machine = probe(Path("/data/models"), host=captured("epyc-dual"))
    cpu, dram = machine.cpu, machine.dram
    assert (cpu.sockets, cpu.cores, cpu.threads_per_core, cpu.l3_bytes) == (2, 128, 2, 512 * MIB)
    assert cpu.isa == ("avx2", "fma", "f16c")
    assert [(node.cpus[0], len(node.cpus), node.distances) for node in machine.numa] == [
        (0, 128, (10, 32)),
        (64, 128, (32, 10)),
    ]
    assert (len(dram.dimms), dram.slots, dram.channels, dram.mts, dram.nominal_gb_s) == (16, 32, 16, 3200, 409.6)
    assert dram.kind == "DDR4"
    assert {dimm.size_bytes for dimm in dram.dimms} == {64 * GIB}
    assert dram.total_bytes == 1056536124 * KIB
    assert machine.gpus == ()
    assert machine.pmem is None
    assert machine.virtual is None
    assert machine.container is None


def test_limits_of_parent_control_groups_apply(captured: Captured) -> None:
    machine = probe(host=captured("epyc-dual"))
    assert machine.limits.cgroup_memory_bytes == 900 * GIB
    assert machine.limits.cgroup_cpus == 120.0
    assert machine.limits.cpuset is None
    assert machine.limits.memlock_bytes is None
    assert "850.0 GiB" in notes_on(machine, "limits.cgroup_memory_bytes")
    assert "16 more pages of 1.0 GiB" in notes_on(machine, "huge_pages")


def test_desktop_without_lscpu_and_with_memory_below_its_rating(captured: Captured) -> None:
    machine = probe(Path("/home/me/models"), host=captured("desktop"))
    assert machine.cpu.model == "AMD Ryzen 9 7950X 16-Core Processor"
    assert (machine.cpu.sockets, machine.cpu.cores, machine.cpu.threads_per_core) == (1, 16, 2)
    assert machine.cpu.l3_bytes == 64 * MIB
    assert "avx512_vbmi" in machine.cpu.isa
    assert (machine.dram.channels, machine.dram.mts, machine.dram.nominal_gb_s) == (2, 4800, 76.8)
    for speed in ("6000 MT/s", "4800"):
        assert speed in notes_on(machine, "dram.mts")
    assert "zram" in notes_on(machine, "swap")


def test_eight_cards_with_two_bridges(captured: Captured) -> None:
    machine = probe(host=captured("eight-3090"))
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    assert {(gpu.name, gpu.vram_bytes, gpu.nominal_gb_s, gpu.compute_capability) for gpu in machine.gpus} == {
        ("NVIDIA GeForce RTX 3090", 24 * GIB, 936.1, "8.6")
    }
    assert machine.nvlinks == (NvLink((1, 5), 4, 56.2), NvLink((3, 6), 4, 56.2))
    assert (machine.dram.channels, machine.dram.mts, machine.dram.nominal_gb_s) == (8, 2933, 187.7)
    assert machine.swap is not None
    assert machine.swap.total_bytes == 134217724 * KIB
    assert "idle" in notes_on(machine, "gpus[0-7].pcie.generation")
    assert notes_on(machine, "gpus[7].pcie.width")
    assert machine.gpus[0].pcie.nominal_gb_s == 31.5  # at best, not at the idle generation


def test_memory_mode_makes_pmem_the_memory_and_dram_its_cache(captured: Captured) -> None:
    machine = probe(host=captured("optane-memory-mode"))
    assert machine.pmem is not None
    assert (machine.pmem.mode, machine.pmem.dimms) == ("memory", 6)
    assert machine.pmem.memory_mode_bytes == 791234567 * KIB
    assert machine.pmem.available_bytes == 778888888 * KIB
    assert (machine.dram.total_bytes, machine.dram.available_bytes) == (96 * GIB, None)
    assert (len(machine.dram.dimms), machine.dram.channels, machine.dram.nominal_gb_s) == (6, 6, 128.0)
    memory = next(tier for tier in machine.tiers() if tier.kind in ("dram", "pmem"))
    assert (memory.name, memory.cached_by, memory.capacity_bytes) == ("pmem", "dram", 791234567 * KIB)
    assert machine.gpus[0].nominal_gb_s == 360.0


def test_app_direct_separates_memory_and_namespaces(captured: Captured) -> None:
    machine = probe(Path("/mnt/pmem0/models"), host=captured("pmem-app-direct"))
    assert machine.pmem is not None
    assert (machine.pmem.mode, machine.pmem.dimms, machine.pmem.memory_mode_bytes) == ("app-direct", 8, None)
    assert [(space.mode, space.device, space.mount) for space in machine.pmem.namespaces] == [
        ("devdax", "/dev/dax1.0", None),
        ("fsdax", "/dev/pmem0", "/mnt/pmem0"),
    ]
    assert [tier.name for tier in machine.tiers()] == ["dram", "pmem", "disk"]
    assert machine.dram.total_bytes == 197654321 * KIB
    assert "sudo dmidecode -t 17" in notes_on(machine, "dram.dimms")
    assert "persistent memory" in notes_on(machine, "disk.kind")


def test_virtual_machine_that_hides_its_hardware(captured: Captured) -> None:
    machine = probe(Path("/models"), host=captured("this-vm"))
    assert machine.virtual == "KVM"
    assert (machine.cpu.sockets, machine.cpu.cores) == (1, 2)
    assert machine.dram.nominal_gb_s is None
    assert "apt-get install dmidecode" in notes_on(machine, "dram.dimms")
    assert machine.disk is not None
    assert (machine.disk.kind, machine.disk.device) == (None, "/dev/vda")
    assert "virtual disk" in notes_on(machine, "disk.kind")
    assert machine.container is None  # .dockerenv was left in the image
    assert "docker" in notes_on(machine, "container")
    assert "hypervisor" in notes_on(machine, "numa")


def test_real_h200(captured: Captured) -> None:
    machine = probe(host=captured("h200-vm"))
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.compute_capability, gpu.power_limit_w) == ("NVIDIA H200", "9.0", 700.0)
    assert gpu.vram_bytes == 143771 * MIB
    assert gpu.nominal_gb_s == pytest.approx(4800, rel=0.01)  # NVIDIA's data sheet: 4.8 TB/s
    assert gpu.pcie.nominal_gb_s == 63.0
    assert "amx_int8" in machine.cpu.isa
    assert machine.nvlinks == ()


def test_a_machine_where_nothing_can_be_read(made: Callable[..., Host]) -> None:
    machine = probe(Path("/models"), host=made())
    assert machine.name == "this"
    assert machine.cpu.model is None
    assert machine.cpu.cores is None
    assert machine.dram.total_bytes is None
    assert machine.disk is not None
    assert machine.disk.free_bytes is None
    about = {note.about for note in machine.notes}
    assert {"cpu.cores", "dram.dimms", "numa", "disk.device", "limits"} <= about


@pytest.mark.parametrize("name", MACHINES)
def test_every_file_may_be_missing(name: str, captured: Captured) -> None:
    """Leave out one file or command at a time: the probe never fails."""
    host = captured(name)
    capture = Path(__file__).parents[2] / "data" / "hardware" / name / "capture.txt"
    paths = [line.split()[-2] for line in capture.read_text().splitlines() if line.startswith(("-- /", "-- hex /"))]
    whole = probe(Path("/home"), host=host)

    class Without:
        hidden = ""

        def __getattr__(self, attribute: str) -> object:
            return getattr(host, attribute)

        def text(self, path: str) -> str | None:
            return None if path == self.hidden else host.text(path)

    for path in paths:
        without = Without()
        without.hidden = path
        assert isinstance(probe(Path("/home"), host=without), Machine)  # type: ignore[arg-type]
    assert probe(Path("/home"), host=host) == whole


@pytest.mark.parametrize("name", MACHINES)
def test_a_probed_machine_survives_its_file(name: str, captured: Captured, tmp_path: Path) -> None:
    machine = probe(Path("/home"), host=captured(name))
    machine_file.write(machine, tmp_path / "machine.toml")
    assert catalog.find(str(tmp_path / "machine.toml")) == machine


@pytest.mark.parametrize("name", MACHINES)
def test_unknowns_that_a_plan_needs_have_a_note(name: str, captured: Captured) -> None:
    machine = probe(Path("/home"), host=captured(name))
    about = " ".join(note.about for note in machine.notes)
    if machine.dram.nominal_gb_s is None:
        assert "dram." in about
    for gpu in machine.gpus:
        if gpu.vram_bytes is None or gpu.nominal_gb_s is None:
            assert f"gpus[{gpu.index}]." in about
    if machine.pmem and machine.pmem.nominal_gb_s is None:
        assert "pmem.nominal_gb_s" in about
    assert machine.disk is not None
    assert "disk.nominal_gb_s" in about or "disk.device" in about
