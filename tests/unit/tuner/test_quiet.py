"""What disturbed a measurement, from two looks at /proc."""

from types import SimpleNamespace
from typing import Any

import pytest

from support.written_host import WrittenHost
from tokenmill.tuner.noise_monitor import Look, Ticks, hot_cards, judge, look, parse_process, parse_totals

TICKS_S = 100.0
STAT = """cpu  100 20 30 900 5 1 2 40 0 0
cpu0 50 10 15 450 2 0 1 20 0 0
cpu1 50 10 15 450 3 1 1 20 0 0
intr 1 2 3
"""
PROCESS = "4242 (odd) name (x)) S 17 4242 4242 0 -1 4194304 100 0 0 0 250 50 7 8 20 0 4 0 9999 1 2 3"


def process(used: int, name: str = "other", *, parent: int = 1, started: int = 5) -> Ticks:
    return Ticks(name, parent, started, used)


def looks(before: dict[int, Ticks], after: dict[int, Ticks], **more: Any) -> tuple[Look, Look]:
    """Ten seconds of two processors."""
    first = {name.removesuffix("_before"): value for name, value in more.items() if name.endswith("_before")}
    last = {name: value for name, value in more.items() if not name.endswith("_before")}
    return Look(0.0, processors=2, processes=before, **first), Look(10.0, processors=2, processes=after, **last)


def judged(before: dict[int, Ticks], after: dict[int, Ticks], **more: Any) -> str | None:
    return judge(*looks(before, after, **more), ours={1, 2000}, ticks_s=TICKS_S)


def test_totals() -> None:
    assert parse_totals(STAT) == (150, 40, 2)
    assert parse_totals("") == (None, None, 1)
    assert parse_totals("cpu  0 0 0 0 0 0 0 0\ncpu0 0 0 0 0\n") == (None, None, 1)
    assert parse_totals("cpu  1 2 3 4 5 6 7\ncpu0 1 2 3\n") == (6, None, 1)


def test_a_process_whose_name_holds_brackets() -> None:
    assert parse_process(PROCESS) == Ticks("odd) name (x)", 17, 9999, 300)
    assert parse_process("4242 (gone") is None


def test_a_look_reads_all_processes_and_heat() -> None:
    heat = "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    seen = look(WrittenHost({"/proc/stat": STAT, "/proc/4242/stat": PROCESS, "/proc/self/stat": PROCESS, heat: "3\n"}))
    assert (seen.busy, seen.stolen, seen.processors, seen.throttled) == (150, 40, 2, 3)
    assert seen.processes == {4242: Ticks("odd) name (x)", 17, 9999, 300)}


QUIET: list[tuple[dict[int, Ticks], dict[int, Ticks]]] = [
    ({}, {}),
    ({7: process(100)}, {7: process(240)}),  # 0.14 cores
    ({2000: process(0)}, {2000: process(2000)}),  # ours
    ({9: process(0, parent=2)}, {9: process(900, parent=2)}),  # the kernel's
    ({7: process(5000)}, {}),  # gone
]


@pytest.mark.parametrize(("before", "after"), QUIET)
def test_what_is_no_disturbance(before: dict[int, Ticks], after: dict[int, Ticks]) -> None:
    assert judged(before, after) is None


def test_a_process_is_named_with_its_cores() -> None:
    assert judged({123: process(0, "python3")}, {123: process(800, "python3")}) == "python3 (pid 123) used 0.8 cores"


def test_one_of_the_same_number_that_started_later_counts_from_nothing() -> None:
    before, after = {7: process(5000)}, {7: process(400, started=9)}
    assert judged(before, after) == "other (pid 7) used 0.4 cores"


def test_many_small_ones_disturb_together() -> None:
    after = {number: process(60, f"job{number}") for number in range(10, 15)}
    found = judged({}, after)
    assert found is not None
    assert "4 others 0.2" in found


def test_a_large_machine_bears_more() -> None:
    first, last = looks({}, {7: process(500)})
    wide = Look(0.0, processors=128), Look(10.0, processors=128, processes=last.processes)
    assert judge(*wide, ours=(), ticks_s=TICKS_S) is None
    assert judge(first, last, ours=(), ticks_s=TICKS_S) is not None


def test_steal_heat_and_what_cannot_be_seen() -> None:
    assert judged({}, {}, stolen_before=10, stolen=110) == "the hypervisor gave 5% of the processors' time to others"
    assert judged({}, {}, stolen_before=10, stolen=40) is None
    assert judged({}, {}, throttled_before=3, throttled=4) == "processors were slowed for heat"
    assert judged({}, {}, throttled_before=3, throttled=3) is None
    unseen = judged({2000: process(0)}, {2000: process(1000)}, busy_before=0, busy=1500)
    assert unseen == "processes that have ended or cannot be seen from here used 0.5 cores"
    assert judged({2000: process(0)}, {2000: process(1000)}, busy_before=0, busy=1100) is None


def test_no_time_has_passed() -> None:
    now = Look(1.0)
    assert judge(now, now, ours=(), ticks_s=TICKS_S) is None


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
