"""A short measurement of this machine; asserts relations that hold on any machine, not speeds."""

import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tokenmill.hardware.bandwidth import disk
from tokenmill.hardware.bandwidth.measure import measure, usable_cores
from tokenmill.hardware.bandwidth.memory import measure_mapped
from tokenmill.hardware.machine import Cpu, Machine, Rate
from tokenmill.units import MIB

SMALL = Machine("here", cpu=Cpu(l3_bytes=32 * MIB))


@pytest.fixture(autouse=True)
def _any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow temporary folders in memory and slow disks, without changing the tested code."""
    monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEMS", ())
    monkeypatch.setattr(disk, "MIN_TEMPORARY_BYTES", disk.BLOCK_BYTES)


def _holds_together(rate: Rate) -> None:
    assert rate.by_threads
    assert rate.gb_s == max(rate.by_threads.values())
    assert rate.threads is not None
    assert rate.by_threads[rate.threads] == rate.gb_s
    assert list(rate.by_threads) == sorted(rate.by_threads)
    assert 1 in rate.by_threads


def test_memory_is_read_and_copied() -> None:
    affinity = os.sched_getaffinity(0)
    before = datetime.now(UTC).replace(microsecond=0)
    said: list[str] = []
    measured = measure(SMALL, seconds=0.4, progress=said.append)
    assert [rate.path for rate in measured.rates] == ["dram", "dram->dram"]
    for rate in measured.rates:
        _holds_together(rate)
        assert max(rate.by_threads) <= len(usable_cores(SMALL))
    # A copy reads every byte it counts; the fastest machine reads 2000 GB/s, one that others use as little as it likes.
    assert 0 < (measured.gb_s("dram") or 0) < 2000
    assert 0 < (measured.gb_s("dram->dram") or 0) < 2000
    assert before <= datetime.fromisoformat(measured.when) <= datetime.now(UTC)
    assert f"dram: 1 of {len(usable_cores(SMALL))} cores" in said
    assert os.sched_getaffinity(0) == affinity, "only the streaming threads are pinned"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bandwidth")]


def test_the_disk_is_read_through_a_temporary_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    said: list[str] = []
    rate = disk.measure_disk(tmp_path, 0.5, said.append)
    assert list(tmp_path.iterdir()) == []
    assert rate is not None, said
    _holds_together(rate)
    assert rate.path == "disk"
    assert said[-1].startswith("disk: reading a temporary file of")


def test_a_model_file_is_read_where_there_is_one(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    block = os.urandom(MIB)
    with model.open("wb") as opened:
        for _ in range(256):
            opened.write(block)
    said: list[str] = []
    rate = disk.measure_disk(tmp_path, 0.3, said.append)
    assert rate is not None, said
    _holds_together(rate)
    assert model.name in said[-1] or "temporary" in said[-1]  # the second where O_DIRECT is refused
    assert list(tmp_path.iterdir()) == [model]
    model.write_bytes(block)
    assert disk.measure_file(model, 0.1) is None  # too small


def test_without_o_direct_the_page_cache_is_dropped_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_make_direct", lambda _descriptor: False)
    said: list[str] = []
    rate = disk.measure_disk(tmp_path, 0.3, said.append)
    assert rate is not None, said
    assert said[-1].endswith("with buffered reads after dropping it from the page cache")


def test_a_folder_that_may_not_be_written_is_left_out_with_the_reason() -> None:
    said: list[str] = []
    assert disk.measure_disk(Path("/proc"), 0.1, said.append) is None
    assert said[-1].startswith("disk: skipped")


def test_a_mapped_file_is_read_and_copied_to_memory(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(64 * MIB))
    rates = measure_mapped(model, usable_cores(SMALL)[:2], 64 * MIB, 0.1, lambda _text: None)
    assert [rate.path for rate in rates] == ["pmem", "pmem->dram"]
    for rate in rates:
        _holds_together(rate)


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tokenmill.hardware.bandwidth import disk\n"
        "disk.MEMORY_FILE_SYSTEMS, disk.MIN_TEMPORARY_BYTES = (), disk.BLOCK_BYTES\n"
        "disk.measure_disk(Path(sys.argv[1]), 2.0, lambda text: print(text, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert "temporary" in running.stdout.readline()  # it is written and being read now
        running.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
