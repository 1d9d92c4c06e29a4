"""The probe and its command on this machine."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tokenmill.cli import run
from tokenmill.hardware.dmi import read_modules
from tokenmill.hardware.gpu.nvml import NvmlReading, read
from tokenmill.hardware.host import LocalHost
from tokenmill.hardware.probe import probe


def test_agrees_with_what_python_sees(tmp_path: Path) -> None:
    machine = probe(tmp_path / "not" / "yet" / "there")
    seen = (
        machine.pmem.memory_mode_bytes if machine.pmem and machine.pmem.memory_mode_bytes else machine.dram.total_bytes
    )
    assert seen == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.swap is not None
    areas = Path("/proc/swaps").read_text().splitlines()[1:]
    assert machine.swap.total_bytes == sum(int(area.split()[2]) * 1024 for area in areas)
    assert machine.cpu.cores is not None
    assert machine.cpu.cores <= (os.cpu_count() or 1)
    assert machine.limits.cpuset is None or set(machine.limits.cpuset) == os.sched_getaffinity(0)
    assert machine.disk is not None
    assert machine.disk.total_bytes == shutil.disk_usage(tmp_path).total
    assert sorted(cpu for node in machine.numa for cpu in node.cpus) == sorted(range(os.cpu_count() or 0))


def test_takes_little_of_the_processors() -> None:
    """Of their time, and that of programs it asks: on the clock it depends on what else the machine does."""

    def used_s() -> float:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system

    probe()  # the first one pays for imports
    before_s = used_s()
    probe(Path.cwd())
    assert used_s() - before_s < 5.0  # a hundredth of that where processors are quick


def test_without_a_path_there_is_no_disk() -> None:
    assert probe().disk is None


def test_nvml_answers_or_is_not_there() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert read(pynvml) == NvmlReading(library=False)
    else:
        assert read(pynvml).library


def test_modules_are_listed_or_it_is_said_why_not() -> None:
    modules, notes = read_modules(LocalHost())
    assert (modules is None) == bool(notes)
    assert all(module.locator for module in modules or () if module.size_bytes)


def test_commands_that_do_not_exist_or_fail() -> None:
    host = LocalHost()
    assert host.run("tokenmill-no-such-command") is None
    failed = host.run(sys.executable, "-c", "import sys; sys.exit('no')")
    assert failed is not None
    assert (failed.code, failed.err.strip()) == (1, "no")
    assert host.text("/no/such/file") is None
    assert host.space("/no/such/file") is None
    assert host.link("/proc/self/ns/pid") is not None
    assert host.link("/etc/os-release-not") is None


def test_command_shows_every_section(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["probe", "--path", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("machine", "CPU", "memory", "NUMA", "disk", "swap", "huge pages", "limits"):
        assert f"\n{word}" in f"\n{shown}"
    assert max(map(len, shown.splitlines())) <= 80


def test_command_as_json_is_the_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", "probe", "--json", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["cpu"]["cores"] == probe().cpu.cores
    assert document["disk"]["path"] == str(tmp_path)
    assert all(set(note) == {"about", "text"} for note in document["notes"])


def test_command_writes_a_file_that_it_can_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    assert run(["probe", "-o", str(file), "--json", "--path", str(tmp_path)]) == 0
    written = capsys.readouterr()
    assert f"--machine {file}" in written.err
    assert run(["probe", "--machine", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(written.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machine", "no-such-machine"], "no machine called"),
        (["--machine", "epyc-9175f", "--measure"], "measure and machine"),
        (["--machine", "epyc-9175f", "--path", "/"], "path and machine"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_command_used_wrongly(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
