"""The kernel's page cache: residency of real files, and filling."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tokenmill.engine import residency
from tokenmill.engine.page_cache import FillProgress, fill, resident
from tokenmill.errors import ModelError
from tokenmill.units import MIB

SIZE = 40 * MIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file on disk that is not cached."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    forget(path)
    return path


def forget(path: Path, offset: int = 0, size: int = 0) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())  # what is not written yet cannot be dropped
        os.posix_fadvise(opened.fileno(), offset, size, os.POSIX_FADV_DONTNEED)


def touch(path: Path, offset: int, size: int) -> None:
    """Cache exactly this part of a file, without read-ahead."""
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(opened.fileno(), size, offset)


def test_a_file_is_cold_then_filled_then_warm(model: Path) -> None:
    assert resident(model).bytes == 0
    steps: list[FillProgress] = []
    done = fill([model], progress=steps.append)
    assert (done.total_bytes, done.cold_bytes, done.read_bytes) == (SIZE, SIZE, SIZE)
    assert not done.stopped
    assert done.notes == ()
    assert done.gb_s
    assert done.gb_s > 0
    assert resident(model).bytes == SIZE
    assert steps[-1].bytes_done == steps[-1].bytes_total == SIZE
    again = fill([model])
    assert (again.cold_bytes, again.read_bytes, again.gb_s) == (0, 0, None)
    assert "40.0 MiB" in again.describe()


def test_residency_tells_ranges(model: Path) -> None:
    touch(model, 16 * MIB, 16 * MIB)
    found = resident(model)
    assert found.bytes == 16 * MIB
    assert [(part.offset_bytes, part.bytes, part.resident_bytes) for part in found.ranges] == [
        (0, 16 * MIB, 0),
        (16 * MIB, 16 * MIB, 16 * MIB),
        (32 * MIB, 8 * MIB, 0),
    ]


def test_only_what_is_missing_is_read(model: Path) -> None:
    touch(model, 16 * MIB, 16 * MIB)
    done = fill([model])
    assert done.read_bytes == done.cold_bytes == 24 * MIB
    assert resident(model).cold_bytes == 0


def test_both_ways_of_asking_agree(model: Path) -> None:
    touch(model, 5 * MIB, 3 * MIB)
    with model.open("rb") as opened:
        for offset, size in ((0, SIZE), (4 * MIB, 2 * MIB), (6 * MIB + 4096, MIB), (20 * MIB, MIB)):
            by_mapping = residency._mincore(opened.fileno(), offset, size)
            counted = residency._cachestat(opened.fileno(), offset, size)
            assert counted in (None, by_mapping)  # None: a kernel before 6.5
    assert resident(model).bytes == 3 * MIB


def test_an_older_kernel_is_asked_by_mapping(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(model, 0, 2 * MIB)
    monkeypatch.setattr(residency, "_CACHESTAT", 100_000)  # no such system call
    assert resident(model).bytes == 2 * MIB


def test_splits_are_filled_in_order_and_to_the_room_there_is(tmp_path: Path) -> None:
    splits = [tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for split in splits:
        split.write_bytes(os.urandom(MIB) * 4)
        forget(split)
        touch(split, 0, 4096)  # one page of each is already cached
    done = fill(splits, available_bytes=6 * MIB + 3 * 4096, parallel=1)
    assert done.read_bytes == 6 * MIB
    assert "only 6.0 MiB fit" in done.notes[0]
    assert resident(splits[0]).cold_bytes == 0
    # the kernel may read ahead
    assert (resident(splits[1]).bytes or 0) >= 2 * MIB
    assert resident(splits[2]).bytes == 4096


def test_no_room_reads_nothing_and_says_so(model: Path) -> None:
    done = fill([model], available_bytes=0)
    assert done.read_bytes == 0
    assert "only 0 B fit" in done.notes[0]
    assert resident(model).bytes == 0


def test_stopping_leaves_no_thread_and_says_how_far_it_came(model: Path) -> None:
    stop = threading.Event()
    stop.set()
    done = fill([model], stop=stop)
    assert done.stopped
    assert done.read_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fill-")]


def test_a_broken_callback_stops_the_readers(model: Path) -> None:
    def broken(_: FillProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill([model], progress=broken)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fill-")]


def test_holes_are_no_data(tmp_path: Path) -> None:
    ghost = tmp_path / "ghost.gguf"
    with ghost.open("wb") as opened:
        opened.write(b"header" * 1000)
        opened.truncate(500 << 30)  # half a terabyte that costs nothing
    forget(ghost)
    found = resident(ghost)
    assert found.total_bytes < MIB
    assert fill([ghost]).read_bytes < MIB


def test_a_file_in_memory_needs_nothing() -> None:
    path = Path(f"/dev/shm/tokenmill-{os.getpid()}.bin")
    path.write_bytes(b"x" * MIB)
    try:
        found = resident(path)
        assert found.cold_bytes == 0
        assert found.why is not None
        assert "memory already" in found.why
        assert fill([path]).read_bytes == 0
    finally:
        path.unlink()


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        resident(tmp_path / "absent.gguf")


def test_of_another_users_file_the_kernel_does_not_tell() -> None:
    """Of root's shell, as another user: mincore would report every page as resident."""
    script = (
        "import os; from pathlib import Path\n"
        "from tokenmill.engine import residency\n"
        "residency._CACHESTAT = 100_000\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "found = residency.resident(Path('/bin/sh').resolve())\n"
        "print(found.bytes, found.cold_bytes, found.why)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None None ")
    assert "owner" in done.stdout


def test_a_big_file_takes_a_moment(tmp_path: Path) -> None:
    """A sparse file of half a terabyte: measures the overhead per block."""
    with (tmp_path / "big.bin").open("wb+") as opened:
        opened.truncate(500 << 30)
        blocks = list(residency._blocks(opened.fileno(), [(0, 500 << 30)]))
    assert len(blocks) == 32000
    assert sum(block.resident_bytes or 0 for block in blocks) == 0
