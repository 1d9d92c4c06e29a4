"""Parsers of /proc files as Linux 6.1 writes them, and GPU memory from NVML."""

from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.engine.loading.process import (
    ProcessMemory,
    ProcessReads,
    maps_any,
    parse_io,
    parse_major_faults,
    parse_memlock,
    parse_status,
    vram_by_gpu,
)
from tokenmill.engine.loading.system import Pressure, parse_block_stat, parse_pressure
from tokenmill.units import KIB, MIB

STATUS = """\
Name:	llama-server
State:	D (disk sleep)
VmPeak:	 2761048 kB
VmLck:	       8 kB
VmRSS:	 1385128 kB
RssAnon:	   17408 kB
RssFile:	 1367720 kB
RssShmem:	       0 kB
VmSwap:	      12 kB
CapEff:	0000000000000000
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             96244                96244                processes
Max locked memory         8388608              8388608              bytes
"""
MAPS = """\
7f1000000000-7f1052a00000 r--s 00000000 fe:00 1187 /models/kimi k2-00001-of-00013.gguf
7f2000000000-7f2000001000 rw-p 00000000 00:00 0
7f2000002000-7f2000003000 r-xp 00000000 fe:00 99 /usr/lib/libc.so.6
"""


def test_memory_by_kind() -> None:
    memory = parse_status(STATUS)
    assert memory == ProcessMemory(17408 * KIB, 1367720 * KIB, 0, 12 * KIB, 8 * KIB)
    assert memory.rss_bytes == 1385128 * KIB
    assert parse_status("").rss_bytes is None


def test_reads() -> None:
    assert parse_io("rchar: 1385587616\nwchar: 3\nread_bytes: 4096\n") == ProcessReads(1385587616, 4096)
    assert parse_io("") == ProcessReads()


def test_major_faults() -> None:
    assert parse_major_faults("41 (llama (x) y) R 1 2 3 4 5 6 70 80 91 99 0 0") == 91
    assert parse_major_faults("") is None


@pytest.mark.parametrize(
    ("limits", "status", "wanted"),
    [
        (LIMITS, STATUS, (True, 8388608)),
        (LIMITS.replace("8388608", "unlimited"), STATUS, (True, None)),
        (LIMITS, STATUS.replace("0000000000000000", "000001fffeffffff"), (True, None)),  # CAP_IPC_LOCK
        ("", "", (False, None)),
    ],
)
def test_what_may_be_locked(limits: str, status: str, wanted: tuple[bool, int | None]) -> None:
    assert parse_memlock(limits, status) == wanted


def test_a_mapped_file_is_known_by_name_and_inode() -> None:
    assert maps_any(MAPS, frozenset({("kimi k2-00001-of-00013.gguf", 1187)}))
    assert not maps_any(MAPS, frozenset({("kimi k2-00001-of-00013.gguf", 1188)}))
    assert not maps_any(MAPS, frozenset())


def test_pressure() -> None:
    text = (
        "some avg10=13.22 avg60=0.18 avg300=1.11 total=105110988\nfull avg10=11.44 avg60=0.05 avg300=0.82 total=6932\n"
    )
    assert parse_pressure(text) == Pressure(0.1322, 0.1144)
    assert parse_pressure("") == Pressure()


def test_a_disk() -> None:
    text = "  548714    80294 279487050  1054901   581894   552674 177056464   754731        0   204468  1868646   653983\n"
    assert parse_block_stat(text) == (279487050 * 512, 204.468)
    assert parse_block_stat("") == (None, None)


class Refused(Exception):
    """NVML's exception."""


def nvml(compute: dict[int, list[tuple[int, int | None]]], graphics: dict[int, list[tuple[int, int | None]]]) -> Any:
    """A recorded driver: GPU -> (process, bytes)."""

    def running(table: dict[int, list[tuple[int, int | None]]], handle: int) -> list[Any]:
        if handle not in table:
            raise Refused
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in table[handle]]

    return SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running(compute, handle),
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: running(graphics, handle),
    )


def test_gpu_memory_of_processes() -> None:
    driver = nvml({0: [(10, 5 * MIB), (99, MIB)], 1: [(11, 7 * MIB), (10, MIB)]}, {0: [(10, 5 * MIB)]})
    assert vram_by_gpu(driver, (10, 11)) == {0: 5 * MIB, 1: 8 * MIB}


def test_gpu_memory_that_the_driver_does_not_tell() -> None:
    assert vram_by_gpu(nvml({0: [(10, None)], 1: []}, {}), (10,)) is None
    assert vram_by_gpu(nvml({0: [(4711, MIB)], 1: []}, {}), (10,)) is None  # numbered as another namespace does
    missing = nvml({}, {})

    def refuse() -> None:
        raise Refused

    missing.nvmlInit = refuse
    assert vram_by_gpu(missing, (10,)) is None
