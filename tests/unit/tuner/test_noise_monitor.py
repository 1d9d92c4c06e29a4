"""Detection of other load from two samples of the machine."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from support.written_host import WrittenHost
from tokenmill.tuner.noise_monitor import CpuUsage, MachineSample, hot_cards, judge, snapshot


def process(used_s: float, name: str = "other", *, parent: int = 1, started: float = 5) -> CpuUsage:
    return CpuUsage(name, parent, started, used_s)


def looks(before: dict[int, CpuUsage], after: dict[int, CpuUsage], **more: Any) -> tuple[MachineSample, MachineSample]:
    """Ten seconds of two processors."""
    first = {name.removesuffix("_before"): value for name, value in more.items() if name.endswith("_before")}
    last = {name: value for name, value in more.items() if not name.endswith("_before")}
    return MachineSample(0.0, processors=2, processes=before, **first), MachineSample(
        10.0, processors=2, processes=after, **last
    )


def judged(before: dict[int, CpuUsage], after: dict[int, CpuUsage], **more: Any) -> str | None:
    return judge(*looks(before, after, **more), ours={1, 2000})


def test_a_snapshot_holds_processes_totals_and_heat() -> None:
    heat = "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    before = snapshot(WrittenHost({heat: "3\n"}))
    own, process = before.processes[os.getpid()], psutil.Process()
    assert before.throttled == 3
    assert before.processors == psutil.cpu_count()
    assert (own.name, own.parent, own.started) == (process.name(), process.ppid(), process.create_time())
    end_s = own.used_s + 0.05
    while sum(process.cpu_times()[:2]) < end_s:
        pass
    after = snapshot(WrittenHost({}))
    assert after.processes[os.getpid()].used_s >= end_s
    assert after.throttled is None
    assert before.busy_s is not None
    assert after.busy_s is not None
    assert after.busy_s > before.busy_s


QUIET: list[tuple[dict[int, CpuUsage], dict[int, CpuUsage]]] = [
    ({}, {}),
    ({7: process(1)}, {7: process(2.4)}),  # 0.14 cores
    ({2000: process(0)}, {2000: process(20)}),  # ours
    ({9: process(0, parent=2)}, {9: process(9, parent=2)}),  # the kernel's
    ({7: process(50)}, {}),  # gone
]


@pytest.mark.parametrize(("before", "after"), QUIET)
def test_load_that_is_not_a_disturbance(before: dict[int, CpuUsage], after: dict[int, CpuUsage]) -> None:
    assert judged(before, after) is None


def test_a_process_is_named_with_its_cores() -> None:
    assert judged({123: process(0, "python3")}, {123: process(8, "python3")}) == "python3 (pid 123) used 0.8 cores"


def test_one_of_the_same_number_that_started_later_counts_from_nothing() -> None:
    before, after = {7: process(50)}, {7: process(4, started=9)}
    assert judged(before, after) == "other (pid 7) used 0.4 cores"


def test_many_small_ones_disturb_together() -> None:
    after = {number: process(0.6, f"job{number}") for number in range(10, 15)}
    found = judged({}, after)
    assert found is not None
    assert "4 others 0.2" in found


def test_a_large_machine_bears_more() -> None:
    first, last = looks({}, {7: process(5)})
    wide = MachineSample(0.0, processors=128), MachineSample(10.0, processors=128, processes=last.processes)
    assert judge(*wide, ours=()) is None
    assert judge(first, last, ours=()) is not None


def test_steal_heat_and_what_cannot_be_seen() -> None:
    assert judged({}, {}, stolen_s_before=0.1, stolen_s=1.1) == "the hypervisor took 5% of the processor time"
    assert judged({}, {}, stolen_s_before=0.1, stolen_s=0.4) is None
    assert judged({}, {}, throttled_before=3, throttled=4) == "processors were throttled by heat"
    assert judged({}, {}, throttled_before=3, throttled=3) is None
    unseen = judged({2000: process(0)}, {2000: process(10)}, busy_s_before=0.0, busy_s=15.0)
    assert unseen == "processes that ended or are not visible used 0.5 cores"
    assert judged({2000: process(0)}, {2000: process(10)}, busy_s_before=0.0, busy_s=11.0) is None


def test_no_time_has_passed() -> None:
    now = MachineSample(1.0)
    assert judge(now, now, ours=()) is None


class Refused(Exception):
    """NVML's own error."""


@pytest.mark.parametrize(("reasons", "hot"), [((0, 4), ()), ((0x40, 0), (0,)), ((0x04 | 0x20, 0x80), (0, 1))])
def test_cards_that_are_slowed(reasons: tuple[int, ...], hot: tuple[int, ...]) -> None:
    nvml = SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(reasons),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons[handle],
    )
    assert hot_cards(nvml) == hot

    def refuse() -> None:
        raise Refused

    nvml.nvmlInit = refuse
    assert hot_cards(nvml) == ()
