"""Memory as the ledger counts it, from the system's counters."""

from collections.abc import Collection

import pytest

from support.plans import placed, settings
from tokenmill.engine.loading.process import ProcessMemory
from tokenmill.hardware.gpu import nvml
from tokenmill.hardware.host import LocalHost
from tokenmill.model.read import read
from tokenmill.planner.memory.ledger import FIRST_PROMPT_TOKENS
from tokenmill.tuner.point import PointScope
from tokenmill.tuner.soak.judge import MemoryReading, SoakStep
from tokenmill.tuner.soak.memory_watch import Gauge, Group, host_reading, predicted_bytes, read_groups
from tokenmill.tuner.soak.run import default_step, tightest
from tokenmill.tuner.soak.store import speed_of
from tokenmill.units import GIB, MIB

KIMI = read("kimi-k2.5:Q4_K_S")
MEMORY = ProcessMemory(anon_bytes=100, file_bytes=50, shmem_bytes=10, swap_bytes=5)
PLACE = PointScope("box", "m", "model", "id", "native", "build 1")


class Recorded(LocalHost):
    """A machine whose files are given."""

    def __init__(self, files: dict[str, str], free_bytes: int = 0) -> None:
        self.files, self.free_bytes = files, free_bytes

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def nvml(self) -> nvml.NvmlReading:
        return nvml.NvmlReading((nvml.NvmlCard(0, memory_free_bytes=self.free_bytes),))


@pytest.mark.parametrize(
    ("droppable", "available", "groups", "limit", "used", "free"),
    [
        (0, 1000, (), None, 165, 950),  # mapped pages in use are not available, whatever the system says
        (50, 1000, (), None, 115, 1000),  # pages of weights that were rewritten can go
        (80, 1000, (), None, 115, 1000),
        (0, 1000, (Group(300, 200, 60),), None, 165, 110),  # the group's pages of files go when memory is short
        (0, 1000, (), 200, 165, 35),  # a limit that was given is held against the engine alone
        (0, None, (), None, 165, None),
        (0, None, (), 100, 165, -65),
    ],
)
def test_host_memory(
    droppable: int, available: int | None, groups: tuple[Group, ...], limit: int | None, used: int, free: int | None
) -> None:
    found = host_reading(
        "dram", MEMORY, available_bytes=available, droppable_bytes=droppable, groups=groups, limit_bytes=limit
    )
    assert (found.measured_bytes, found.free_bytes, found.page_cache_bytes) == (used, free, 50)


def test_a_process_that_is_gone_holds_an_unknown_amount() -> None:
    found = host_reading("dram", ProcessMemory(), available_bytes=1000, droppable_bytes=0, limit_bytes=500)
    assert (found.measured_bytes, found.free_bytes) == (None, 1000)


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def test_control_groups_of_both_versions_and_those_above_them() -> None:
    v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"
    host = Recorded(
        {
            "/proc/self/mountinfo": MOUNTS,
            "/proc/7/cgroup": "5:cpu:/x\n4:memory:/a/b\n0::/c\n",
            f"{v1}/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            f"{v1}/a/b/memory.usage_in_bytes": "5\n",
            f"{v1}/a/memory.limit_in_bytes": "1000\n",
            f"{v1}/a/memory.usage_in_bytes": "600\n",
            f"{v1}/a/memory.stat": "cache 1\ntotal_cache 200\n",
            f"{v2}/c/memory.max": "2000\n",
            f"{v2}/c/memory.current": "700\n",
            f"{v2}/c/memory.stat": "anon 1\nfile 300\n",
            f"{v2}/memory.max": "max\n",
        }
    )
    assert read_groups(host, 7) == (Group(1000, 600, 200), Group(2000, 700, 300))


def test_the_ledger_between_its_two_moments() -> None:
    plan = placed(KIMI, settings(context=65536), cards=1)
    after = plan.ledger.total("gpu0", "after_load") - plan.ledger.of("gpu0", "reserve")
    full = plan.ledger.total("gpu0") - plan.ledger.of("gpu0", "reserve")
    assert predicted_bytes(plan, "gpu0", 0) == predicted_bytes(plan, "gpu0", FIRST_PROMPT_TOKENS) == after
    assert predicted_bytes(plan, "gpu0", 65536) == predicted_bytes(plan, "gpu0", 99999) == full
    middle = predicted_bytes(plan, "gpu0", (65536 + FIRST_PROMPT_TOKENS) // 2)
    assert middle == pytest.approx((after + full) / 2, abs=2)
    host = placed(KIMI, settings(context=4096))
    assert predicted_bytes(host, "dram", 4096) == host.ledger.needed("dram") - host.ledger.of("dram", "reserve")


def test_every_memory_of_a_plan_is_read() -> None:
    plan = placed(KIMI, settings(context=4096), cards=1)
    host = Recorded(
        {"/proc/meminfo": "MemAvailable:  2048 kB\n", "/proc/7/status": "RssAnon:\t  1024 kB\nRssFile:\t 0 kB\n"},
        free_bytes=3 * GIB,
    )

    def vram(pids: Collection[int]) -> dict[int, int]:
        return {0: 20 * GIB} if 7 in pids else {}

    gauge = Gauge(lambda: (7,), plan, host=host, vram=vram, limit_bytes=2 * MIB)
    dram, gpu = gauge.read(4096)
    assert (dram.tier, dram.measured_bytes, dram.free_bytes) == ("dram", MIB, MIB)
    assert (gpu.tier, gpu.measured_bytes, gpu.free_bytes) == ("gpu0", 20 * GIB, 3 * GIB)
    assert gpu.predicted_bytes == predicted_bytes(plan, "gpu0", 4096)
    assert Gauge(tuple, plan, host=host, vram=vram).read(0) == ()  # an engine elsewhere

    speed = speed_of(SoakStep(4096, 1, (dram, gpu), 50.0, 5.0, computed_tokens=512), PLACE, plan, "now")
    assert (speed.source, speed.depth) == ("soak", 4096)
    assert (speed.figures.host_bytes, speed.figures.gpu_bytes, speed.figures.prefill_tok_s) == (MIB, 20 * GIB, 50.0)
    assert speed.predicted.gpu_bytes == gpu.predicted_bytes


def test_the_tightest_of_several_looks() -> None:
    looks = [
        (MemoryReading("dram", 1, 10, 100, 5),),
        (MemoryReading("dram", 1, 30, 80, 6),),
        (MemoryReading("dram", 1, None, None, 7),),
    ]
    assert tightest(looks) == (MemoryReading("dram", 1, 30, 80, 7),)
    assert tightest([()]) == ()


@pytest.mark.parametrize(
    ("goal", "ubatch", "expected"),
    [(32768, 512, 2048), (8192, 512, 512), (1000, 512, 512), (300, 512, 300), (10000, 512, 512)],
)
def test_steps_are_whole_micro_batches(goal: int, ubatch: int, expected: int) -> None:
    assert default_step(goal, ubatch) == expected
