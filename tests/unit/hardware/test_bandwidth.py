"""Pure parts of bandwidth measurements: threads, working set, stopping, and rates from passes."""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ProbeError, UsageError
from tokenmill.hardware.bandwidth import disk, measure
from tokenmill.hardware.bandwidth import gpu as bandwidth_gpu
from tokenmill.hardware.bandwidth.memory import (
    StreamBuffers,
    copying,
    peak_bytes,
    reading,
    slice_bytes,
    working_set_bytes,
)
from tokenmill.hardware.bandwidth.threads import (
    CpuPlace,
    Pass,
    as_rate,
    best_window_gb_s,
    climb,
    read_places,
    spread_cores,
    stream,
    thread_counts,
    whole_gb_s,
)
from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.hardware.machine import Cpu, Disk, Dram, Gpu, Limits, Machine, Pmem, PmemNamespace, Rate
from tokenmill.units import GIB, MIB, format_bytes


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (128, (1, 2, 4, 8, 16, 32, 64, 128)),
    ],
)
def test_thread_counts_double_up_to_all_cores(cores: int, expected: tuple[int, ...]) -> None:
    assert thread_counts(cores) == expected


@pytest.mark.parametrize(
    ("curve", "measured"),
    [
        ({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}, [1, 2, 4, 8]),  # rises to the end
        ({1: 10.0, 2: 20.0, 4: 20.1, 8: 20.2, 16: 99.0}, [1, 2, 4, 8]),  # flat twice: 16 is not tried
        ({1: 10.0, 2: 9.0, 4: 8.0, 8: 99.0}, [1, 2, 4]),  # falling is not rising
        ({1: 10.0, 2: 10.0, 4: 20.0, 8: 20.0, 16: 21.0}, [1, 2, 4, 8, 16]),  # flat only once
        ({1: 10.0}, [1]),
    ],
)
def test_climbing_stops_when_two_steps_do_not_rise(curve: dict[int, float], measured: list[int]) -> None:
    assert list(climb(curve, curve.__getitem__)) == measured


def test_a_rate_is_its_best_point_and_keeps_every_point() -> None:
    assert as_rate("dram", {1: 12.34567, 2: 30.0, 4: 29.0}) == Rate("dram", 30.0, 2, {1: 12.35, 2: 30.0, 4: 29.0})


def test_equal_rates_report_the_fewest_threads() -> None:
    assert as_rate("dram", {1: 5.0, 2: 9.0, 4: 9.0}).threads == 2


def _steady(gb_s: float, *, start_s: float, end_s: float, pass_s: float) -> list[Pass]:
    count = round((end_s - start_s) / pass_s)
    size_bytes = round(gb_s * 1e9 * pass_s)
    return [Pass(start_s + pass_s * index, start_s + pass_s * (index + 1), size_bytes) for index in range(count)]


def test_steady_threads_add_up() -> None:
    threads = [_steady(3.0, start_s=0.0, end_s=1.0, pass_s=0.01), _steady(5.0, start_s=0.003, end_s=1.2, pass_s=0.007)]
    assert best_window_gb_s(threads) == pytest.approx(8.0, rel=1e-6)


def test_a_disturbance_does_not_lower_the_best_window() -> None:
    disturbed = _steady(1.0, start_s=0.0, end_s=0.5, pass_s=0.01) + _steady(4.0, start_s=0.5, end_s=1.0, pass_s=0.01)
    assert best_window_gb_s([disturbed]) == pytest.approx(4.0, rel=1e-6)
    assert whole_gb_s([disturbed]) == pytest.approx(2.5, rel=1e-6)


def test_passes_outside_the_common_time_do_not_count() -> None:
    alone_at_the_end = [
        _steady(2.0, start_s=0.0, end_s=0.4, pass_s=0.01),
        _steady(2.0, start_s=0.0, end_s=1.0, pass_s=0.01),
    ]
    assert best_window_gb_s(alone_at_the_end) == pytest.approx(4.0, rel=1e-6)


def test_too_few_passes_for_a_window_still_give_a_rate() -> None:
    assert best_window_gb_s([[Pass(0.0, 0.5, 10**9)], [Pass(0.1, 1.0, 10**9)]]) == pytest.approx(2.0)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10**9)), min_size=1, max_size=60), min_size=1, max_size=5
    )
)
def test_no_window_is_faster_than_every_threads_fastest_pass_together(shapes: list[list[tuple[int, int]]]) -> None:
    threads = []
    for shape in shapes:
        at, passes = 0.0, []
        for milliseconds, size_bytes in shape:
            passes.append(Pass(at, at + milliseconds / 1e3, size_bytes))
            at = passes[-1].end_s
        threads.append(passes)
    ceiling = sum(max(each.size_bytes / (each.end_s - each.start_s) for each in passes) for passes in threads) / 1e9
    assert 0 < best_window_gb_s(threads) <= ceiling * (1 + 1e-9)


def _epyc(packages: int, caches: int, cores: int) -> dict[int, CpuPlace]:
    """Logical CPUs as Linux numbers them: every core once, then every core's second thread."""
    places: dict[int, CpuPlace] = {}
    total = packages * caches * cores
    for cpu in range(2 * total):
        core = cpu % total
        places[cpu] = CpuPlace(str(core // (caches * cores)), f"l3-{core // cores}", f"core-{core}")
    return places


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (_epyc(1, 2, 3), (0, 3, 1, 4, 2, 5)),
        (_epyc(2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7)),
        ({7: CpuPlace("0", "a", "7"), 3: CpuPlace("0", "a", "3")}, (3, 7)),
        ({0: CpuPlace("0", "a", "0,1"), 1: CpuPlace("0", "a", "0,1")}, (0,)),
    ],
)
def test_cores_alternate_between_packages_and_caches(places: dict[int, CpuPlace], expected: tuple[int, ...]) -> None:
    assert spread_cores(places) == expected


def _sysfs(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_places_come_from_the_last_cache_and_the_siblings(tmp_path: Path) -> None:
    root = _sysfs(
        tmp_path,
        {
            "cpu4/topology/physical_package_id": "1",
            "cpu4/topology/thread_siblings_list": "4,20",
            "cpu4/cache/index0/shared_cpu_list": "4,20",
            "cpu4/cache/index3/shared_cpu_list": "0-7,16-23",
        },
    )
    assert read_places([4, 5], root) == {4: CpuPlace("1", "0-7,16-23", "4,20"), 5: CpuPlace("0", "0", "5")}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), 3),
        (Limits(cgroup_cpus=2.9), 2),
        (Limits(cgroup_cpus=0.5), 1),
        (Limits(cpuset=(10, 11)), 2),
        (Limits(cgroup_cpus=64.0), 3),
        (Limits(cpuset=(99,)), 3),
    ],
)
def test_cores_within_the_limits(
    limits: Limits, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {10, 11, 12})
    assert len(measure.usable_cores(Machine("m", limits=limits), tmp_path)) == expected


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine("m", dram=Dram(available_bytes=8 * GIB)), 8 * GIB),
        (Machine("m", dram=Dram(available_bytes=8 * GIB), limits=Limits(cgroup_memory_bytes=GIB)), GIB),
        (Machine("m", dram=Dram(available_bytes=GIB), limits=Limits(cgroup_memory_bytes=8 * GIB)), GIB),
        (Machine("m", pmem=Pmem(mode="memory", available_bytes=700 * GIB)), 700 * GIB),
    ],
)
def test_free_memory_is_limited_by_the_control_group(machine: Machine, expected: int) -> None:
    assert measure.free_bytes(machine) == expected


@pytest.mark.parametrize(
    ("cache", "free", "cores", "expected"),
    [
        (32 * MIB, 16 * GIB, 2, 512 * MIB),
        (512 * MIB, 700 * GIB, 64, 2 * GIB),  # four times the caches
        (1152 * MIB, 768 * GIB, 96, 4608 * MIB),
        (32 * MIB, 2 * GIB, 2, 256 * MIB),  # halved, although three quarters of 512 would fit
        (None, 16 * GIB, 2, GIB),
    ],
)
def test_working_set_sizes(cache: int | None, free: int, cores: int, expected: int) -> None:
    assert working_set_bytes(cache, free, thread_counts(cores)) == expected


@pytest.mark.parametrize(
    ("cache", "free", "cores"), [(32 * MIB, 600 * MIB, 2), (512 * MIB, 4 * GIB, 2), (None, GIB, 8)]
)
def test_too_little_free_memory_is_refused_with_a_hint(cache: int | None, free: int, cores: int) -> None:
    with pytest.raises(ProbeError, match=format_bytes(free)) as refused:
        working_set_bytes(cache, free, thread_counts(cores))
    assert refused.value.hint


@given(st.integers(0, 2 * GIB), st.integers(64 * MIB, 1024 * GIB), st.integers(1, 512))
def test_the_working_set_exceeds_the_caches_and_fits_in_free_memory(cache: int, free: int, cores: int) -> None:
    counts = thread_counts(cores)
    try:
        total = working_set_bytes(cache, free, counts)
    except ProbeError:
        return
    assert total >= 2 * cache
    assert 4 * peak_bytes(total, counts) <= free
    sizes = [slice_bytes(total, count) for count in counts]
    assert sizes == sorted(sizes, reverse=True)  # a thread's first block holds all its later ones


def test_blocks_are_made_once_and_shrink() -> None:
    memory = StreamBuffers(128 * MIB)
    first = memory.block(0, 1)
    again = memory.block(0, 4)
    assert (first.size, again.size) == (128 * MIB, 32 * MIB)
    assert np.shares_memory(first, again)


def test_reading_cycles_through_the_whole_block() -> None:
    step = reading(np.ones(160 * MIB, np.uint8))
    assert [step() for _ in range(4)] == [64 * MIB, 64 * MIB, 32 * MIB, 64 * MIB]


def test_copying_copies_all_of_the_source_and_counts_it_once() -> None:
    source, target = np.arange(MIB, dtype=np.uint32).view(np.uint8), np.zeros(4 * MIB, np.uint8)
    assert copying(source, target)() == source.size - 64
    assert (target[64:] == source[:-64]).all()


def test_an_error_in_one_thread_is_raised_and_the_others_do_not_wait_for_it() -> None:
    def prepare(index: int) -> Callable[[], int]:
        if index == 1:
            raise MemoryError("no block for thread 1")
        return lambda: 1

    with pytest.raises(MemoryError, match="thread 1"):
        stream([None, None, None], prepare, seconds=30.0)


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 22 259:0 / /mnt/pmem0 rw,relatime - ext4 /dev/pmem0 rw,dax=always
41 22 259:1 / /mnt/pmem1 rw,relatime - xfs /dev/pmem1 rw,dax,inode64
42 22 259:2 / /mnt/pmem2 rw,relatime - ext4 /dev/pmem2 rw
43 22 259:3 / /mnt/pmem3 rw,relatime - ext4 /dev/pmem3 rw,dax=never
"""


@pytest.mark.parametrize(
    ("folder", "dax"),
    [("/mnt/pmem0", True), ("/mnt/pmem1/models", True), ("/mnt/pmem2", False), ("/mnt/pmem3", False), ("/srv", False)],
)
def test_dax_mounts_are_recognized(folder: str, dax: bool) -> None:
    assert measure.on_dax(MOUNTS, folder) is dax


def _solid(path: Path, size_bytes: int) -> Path:
    with path.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size_bytes)
    return path


def test_the_largest_solid_model_is_found_and_holes_are_not(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    _solid(tmp_path / "small.gguf", 256 * MIB)
    largest = _solid(tmp_path / "deep/er/large.safetensors", 257 * MIB)
    _solid(tmp_path / "other.bin", 258 * MIB)
    with (tmp_path / "ghost.gguf").open("wb") as ghost:
        ghost.truncate(500 * GIB)
    (tmp_path / "broken.gguf").symlink_to(tmp_path / "nowhere")
    assert disk.largest_model(tmp_path, 256 * MIB) == largest
    assert disk.largest_model(tmp_path, GIB) is None


def test_a_disk_in_memory_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = f"22 1 0:1 / {tmp_path.resolve()} rw - tmpfs tmpfs rw\n"
    monkeypatch.setattr(disk, "parse_mountinfo", lambda _text: parse_mountinfo(mounts))
    said: list[str] = []
    assert disk.measure_disk(tmp_path, 1.0, said.append) is None
    (line,) = said
    assert line.startswith("disk: skipped")
    assert "tmpfs" in line


@pytest.mark.parametrize(
    ("free", "expected"), [(80 * GIB, GIB), (2 * GIB, 512 * MIB), (256 * MIB, 64 * MIB), (255 * MIB, None), (0, None)]
)
def test_gpu_buffers_leave_most_of_the_free_memory(free: int, expected: int | None) -> None:
    assert bandwidth_gpu.buffer_bytes(free) == expected


@pytest.mark.parametrize(
    ("gpus", "ordinals", "expected"),
    [
        ([Gpu(0, "A", uuid="GPU-a"), Gpu(1, "B", uuid="GPU-b")], {"GPU-b": 0, "GPU-a": 1}, [(0, 1), (1, 0)]),
        ([Gpu(0, "A", uuid="GPU-a"), Gpu(1, "B", uuid="GPU-b")], {"GPU-b": 0}, [(1, 0)]),
        ([Gpu(0, "A")], {"GPU-a": 0}, [(0, 0)]),
        ([Gpu(0, "A"), Gpu(1, "B")], {"GPU-a": 0, "GPU-b": 1}, []),
        ([Gpu(0, "A", uuid="GPU-a")], {"GPU-other": 0}, []),
    ],
)
def test_cards_are_matched_by_uuid_and_never_by_guess(
    gpus: Sequence[Gpu], ordinals: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    said: list[str] = []
    assert [(gpu.index, ordinal) for gpu, ordinal in bandwidth_gpu.matched(gpus, ordinals, said.append)] == expected
    assert len(said) == len(gpus) - len(expected)


def test_without_the_driver_there_is_no_rate_and_no_error() -> None:
    assert bandwidth_gpu.load("libcuda-that-is-not-there.so.1") is None


class Driver:
    """A driver library with one GPU, whose calls can fail; counts allocations."""

    def __init__(self, *, failing: str = "", status: int = 0, missing: str = "", free_bytes: int = 80 * GIB) -> None:
        self.failing, self.status, self.missing, self.free_bytes = failing, status, missing, free_bytes
        self.held = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.missing:
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def call(self, name: str, *arguments: object) -> int:
        if name == self.failing:
            return self.status
        if name in ("cuMemAlloc_v2", "cuMemHostAlloc", "cuDevicePrimaryCtxRetain"):
            self.held += 1
        if name in ("cuMemFree_v2", "cuMemFreeHost", "cuDevicePrimaryCtxRelease_v2"):
            self.held -= 1
        if name == "cuDeviceGetCount":
            self.write(arguments[0], ctypes.c_int, 1)
        if name == "cuMemGetInfo_v2":
            self.write(arguments[0], ctypes.c_size_t, self.free_bytes)
        if name == "cuGetErrorString":
            self.write(arguments[1], ctypes.c_char_p, b"out of luck")
        return 0

    @staticmethod
    def write(reference: object, kind: type[ctypes.c_int | ctypes.c_size_t | ctypes.c_char_p], value: object) -> None:
        ctypes.cast(cast("ctypes.c_void_p", reference), ctypes.POINTER(kind))[0] = value


def _measure_with(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    monkeypatch.setattr(bandwidth_gpu, "load", lambda: bandwidth_gpu.Cuda(cast("ctypes.CDLL", driver)))
    said: list[str] = []
    machine = Machine("m", gpus=(Gpu(0, "Card", uuid=f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}"),))
    rates = bandwidth_gpu.measure_gpus(machine, 0.003, said.append)
    assert driver.held == 0
    return [rate.path for rate in rates], said


def test_a_gpu_has_three_rates_and_its_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, said = _measure_with(Driver(), monkeypatch)
    assert paths == ["gpu0", "dram->gpu0", "gpu0->dram"]
    (line,) = said
    assert line.startswith("gpu0: ")
    assert "1.0 GiB" in line


@pytest.mark.parametrize(
    ("driver", "skipped", "reason"),
    [
        (Driver(failing="cuInit", status=100), "gpu0", "Card"),
        (Driver(failing="cuInit", status=999), "gpus", "cuInit: out of luck (999)"),
        (Driver(failing="cuMemAlloc_v2", status=2), "gpu0", "cuMemAlloc_v2"),
        (Driver(failing="cuMemHostAlloc", status=2), "gpu0", "cuMemHostAlloc"),
        (Driver(failing="cuMemcpyDtoH_v2", status=700), "gpu0", "cuMemcpyDtoH_v2"),
        (Driver(missing="cuDeviceGetUuid"), "gpus", "cuDeviceGetUuid"),
        (Driver(free_bytes=20 * MIB), "gpu0", "20.0 MiB"),
    ],
)
def test_a_card_that_cannot_be_measured_is_skipped_with_the_reason(
    driver: Driver, skipped: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, said = _measure_with(driver, monkeypatch)
    assert paths == []
    assert said[-1].startswith(f"{skipped}: skipped")
    assert reason in said[-1]


def test_cards_without_a_driver_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_gpu, "load", lambda: None)
    said: list[str] = []
    assert bandwidth_gpu.measure_gpus(Machine("m", gpus=(Gpu(0, "Radeon", "amd"),)), 1.0, said.append) == []
    (line,) = said
    assert line.startswith("gpus: skipped")


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace measuring memory; the list is for progress lines."""
    monkeypatch.setattr(measure, "measure_memory", lambda *_: [Rate("dram", 100.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return []


@pytest.mark.parametrize("mode", ["memory", "mixed"])
def test_memory_mode_is_reported_as_a_measurement_of_the_cache(mode: str, instant: list[str]) -> None:
    pmem = Pmem(mode="memory" if mode == "memory" else "mixed", available_bytes=64 * GIB)
    measured = measure.measure(Machine("m", Cpu(l3_bytes=MIB), pmem=pmem), progress=instant.append)
    assert "Memory Mode" in instant[0]
    assert measured.gb_s("dram") == 100.0


def test_a_busy_machine_is_reported(instant: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(measure.usable_cores(Machine("m")))
    monkeypatch.setattr(os, "getloadavg", lambda: (cores * 0.9, 0.0, 0.0))
    measure.measure(Machine("m", Cpu(l3_bytes=MIB)), progress=instant.append)
    assert f"load {cores * 0.9:.1f} on {cores} cores" in instant[0]


def test_pmem_without_dax_is_skipped(instant: list[str], tmp_path: Path) -> None:
    spaces = (
        PmemNamespace("namespace0.0", "fsdax", GIB, mount=str(tmp_path)),
        PmemNamespace("namespace1.0", "devdax", GIB),
    )
    measured = measure.measure(
        Machine("m", Cpu(l3_bytes=MIB), pmem=Pmem(mode="app-direct", namespaces=spaces)), progress=instant.append
    )
    assert measured.gb_s("pmem") is None
    assert [line.split(",")[0] for line in instant[1:]] == [
        "pmem: namespace0.0 skipped",
        "pmem: namespace1.0 skipped",
    ]


def test_a_dax_mount_without_a_large_file_is_skipped(
    instant: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "on_dax", lambda *_: True)
    spaces = (PmemNamespace("namespace0.0", "fsdax", GIB, mount=str(tmp_path)),)
    measure.measure(Machine("m", Cpu(l3_bytes=MIB), pmem=Pmem(namespaces=spaces)), progress=instant.append)
    assert instant[-1].startswith("pmem: namespace0.0 skipped")
    assert "512.0 MiB" in instant[-1]


def test_a_missing_path_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="gone"):
        measure.measure(Machine("m"), path=tmp_path / "gone")
    with pytest.raises(ProbeError, match="gone"):
        measure.measure(Machine("m", disk=Disk(str(tmp_path / "gone"))))


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_measurement_needs_a_positive_time(seconds: float) -> None:
    with pytest.raises(UsageError, match=f"{seconds:g} seconds"):
        measure.measure(Machine("m"), seconds=seconds)
