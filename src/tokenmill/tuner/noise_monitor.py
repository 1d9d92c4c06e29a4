"""Detects other load on the machine during a measurement: processes, the hypervisor, thermal throttling.

`NoiseMonitor` takes two snapshots and `judge` compares them. Processes that are not visible (in other containers, or
started and ended in between) appear in the kernel's totals. Kernel threads are ignored, because they mostly work for
the measured engine.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tokenmill.engine.process.identity import descendants
from tokenmill.hardware.host import Host, LocalHost, number

MIN_CORES = 0.15  # other processes disturb if together they use more ...
MIN_SHARE = 0.01  # ... and more than this share of the processors
MAX_STOLEN_SHARE = 0.02  # of the processors' time
_KERNEL = 2  # kthreadd, the parent of all kernel threads
_HOT = 0x08 | 0x20 | 0x40 | 0x80  # NVML: slowed by hardware, by heat (driver or hardware), by the power brake


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """A process and the CPU time that it has used so far."""

    name: str
    parent: int
    started: float  # distinguishes processes with the same pid
    used_s: float


@dataclass(frozen=True, slots=True)
class MachineSample:
    """The machine at one moment."""

    at_s: float
    busy_s: float | None = None  # all processors, in user and kernel code
    stolen_s: float | None = None
    processors: int = 1
    processes: Mapping[int, CpuUsage] = field(default_factory=dict)
    throttled: int | None = None  # times that a processor was slowed for heat


def snapshot(host: Host) -> MachineSample:
    """A sample of the machine; thermal throttling is read from `host`."""
    total = psutil.cpu_times()
    known = any(total)  # zero in some sandboxes
    processes = {}
    for process in psutil.process_iter(["name", "ppid", "create_time", "cpu_times"], ad_value=None):
        name, parent, started, times = (process.info[key] for key in ("name", "ppid", "create_time", "cpu_times"))
        if None not in (parent, started, times):
            processes[process.pid] = CpuUsage(name or "", parent, started, times.user + times.system)
    counts = [
        count
        for path in host.glob("/sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
        if (count := number(host.text(path))) is not None
    ]
    return MachineSample(
        time.monotonic(),
        total.user + total.nice + total.system if known else None,
        total.steal if known else None,
        psutil.cpu_count() or 1,
        processes,
        sum(counts) if counts else None,
    )


def judge(before: MachineSample, after: MachineSample, ours: Collection[int]) -> str | None:
    """Describes the load that disturbed the measurement between two samples; None if nothing did."""
    span = after.at_s - before.at_s
    if span <= 0:
        return None
    threshold = max(MIN_CORES, MIN_SHARE * after.processors)
    found = []
    if before.stolen_s is not None and after.stolen_s is not None:
        share = (after.stolen_s - before.stolen_s) / (span * after.processors)
        if share > MAX_STOLEN_SHARE:
            found.append(f"the hypervisor took {share:.0%} of the processor time")
    others = _used(before, after, ours)
    cores = {pid: used / span for pid, used in others.items()}
    if sum(cores.values()) > threshold:
        found.append(_named(cores, after))
    unseen = _unseen(before, after)
    if unseen is not None and unseen / span > threshold:
        found.append(f"processes that ended or are not visible used {unseen / span:.1f} cores")
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        found.append("processors were throttled by heat")
    return "; ".join(found) or None


def _used(before: MachineSample, after: MachineSample, ours: Collection[int]) -> dict[int, float]:
    """CPU time of other processes between two samples, by pid."""
    found = {}
    for pid, now in after.processes.items():
        if pid in ours or _of_kernel(pid, now):
            continue
        used = now.used_s - _before(before, pid, now)
        if used > 0:
            found[pid] = used
    return found


def _unseen(before: MachineSample, after: MachineSample) -> float | None:
    """CPU time in the totals that belongs to no process of the second sample."""
    if before.busy_s is None or after.busy_s is None:
        return None
    seen = sum(now.used_s - _before(before, pid, now) for pid, now in after.processes.items())
    return after.busy_s - before.busy_s - seen


def _before(before: MachineSample, pid: int, now: CpuUsage) -> float:
    then = before.processes.get(pid)
    return then.used_s if then is not None and then.started == now.started else 0.0


def _of_kernel(pid: int, process: CpuUsage) -> bool:
    return _KERNEL in (pid, process.parent)


def _named(cores: Mapping[int, float], after: MachineSample) -> str:
    first, *rest = sorted(cores, key=lambda pid: -cores[pid])
    more = sum(cores[pid] for pid in rest)
    words = f"{after.processes[first].name} (pid {first}) used {cores[first]:.1f} cores"
    return words + (f", {len(rest)} others {more:.1f}" if more >= 0.05 else "")


def hot_cards(nvml: Any) -> tuple[int, ...]:
    """Indices of GPUs that are throttled for a reason other than their power limit."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        reasons = [int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) for handle in handles]
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(index for index, reason in enumerate(reasons) if reason & _HOT)


class NoiseMonitor:
    """Watches this machine from `start` to `stop`."""

    def __init__(self, nvml: Callable[[], Any] | None = None) -> None:
        """`nvml`: a function that returns pynvml; None: GPUs are not watched."""
        self._host = LocalHost()
        self._nvml = nvml
        self._pids: tuple[int, ...] = ()
        self._before: MachineSample | None = None

    def start(self, pids: Collection[int] = ()) -> None:
        """Start watching; this process, `pids` and their descendants are ignored."""
        self._pids = (os.getpid(), *pids)
        self._before = snapshot(self._host)

    def stop(self) -> str | None:
        """Describes the load that disturbed the measurement; None if nothing did."""
        if self._before is None:
            return None
        ours = {pid for root in self._pids for pid in (root, *descendants(root))}
        found = judge(self._before, snapshot(self._host), ours)
        hot = hot_cards(self._nvml()) if self._nvml is not None else ()
        if hot:
            found = "; ".join(filter(None, (found, f"GPU {', '.join(map(str, hot))} was throttled by heat or power")))
        return found
