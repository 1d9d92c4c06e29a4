"""What else used the machine while something was measured: other processes, a hypervisor, heat.

Two looks at /proc and what grew between them. Processes that nobody here can see (another container's, or ones that
came and went in between) show in the kernel's totals. Threads of the kernel are left out: what they do is mostly done
for what is being measured.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.pids import descendants
from tokenmill.hardware.host import Host, LocalHost, number

LEAST_CORES = 0.15  # that others together must use to count ...
LEAST_SHARE = 0.01  # ... or this share of the processors, where that is more
STOLEN = 0.02  # share of the processors' time that a hypervisor gave to others
_KERNEL = 2  # kthreadd: every thread of the kernel is its child
_HOT = 0x08 | 0x20 | 0x40 | 0x80  # NVML: slowed by hardware, by heat (driver or hardware), by the power brake


@dataclass(frozen=True, slots=True)
class Ticks:
    """A process's time on the processors so far."""

    name: str
    parent: int
    started: int  # since boot: tells two of the same number apart
    used: int


@dataclass(frozen=True, slots=True)
class Look:
    """The machine at one moment; times of the kernel in its ticks."""

    at_s: float
    busy: int | None = None  # all processors, in user and kernel code
    stolen: int | None = None
    processors: int = 1
    processes: Mapping[int, Ticks] = field(default_factory=dict)
    throttled: int | None = None  # times that a processor was slowed for heat


def parse_totals(text: str) -> tuple[int | None, int | None, int]:
    """/proc/stat: ticks in user and kernel code, ticks stolen, and how many processors there are."""
    rows = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    processors = max(1, sum(row[0] != "cpu" for row in rows))
    total = next(([int(value) for value in row[1:]] for row in rows if row[0] == "cpu"), [])
    if not any(total):
        return None, None, processors
    return sum(total[:3]), total[7] if len(total) > 7 else None, processors


def parse_process(text: str) -> Ticks | None:
    """/proc/PID/stat."""
    head, _, rest = text.rpartition(")")  # the name may hold anything, brackets and spaces too
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Ticks(head.partition("(")[2], int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))


def look(host: Host) -> Look:
    """The machine now."""
    busy, stolen, processors = parse_totals(host.text("/proc/stat") or "")
    processes = {}
    for path in host.glob("/proc/[0-9]*/stat"):
        found = parse_process(host.text(path) or "")
        if found is not None:
            processes[int(path.split("/")[2])] = found
    counts = [
        count
        for path in host.glob("/sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
        if (count := number(host.text(path))) is not None
    ]
    return Look(time.monotonic(), busy, stolen, processors, processes, sum(counts) if counts else None)


def judge(before: Look, after: Look, ours: Collection[int], ticks_s: float) -> str | None:
    """What disturbed the time between two looks, in words; None: nothing to speak of."""
    span = (after.at_s - before.at_s) * ticks_s
    if span <= 0:
        return None
    most = max(LEAST_CORES, LEAST_SHARE * after.processors)
    found = []
    if before.stolen is not None and after.stolen is not None:
        share = (after.stolen - before.stolen) / (span * after.processors)
        if share > STOLEN:
            found.append(f"the hypervisor gave {share:.0%} of the processors' time to others")
    others = _used(before, after, ours)
    cores = {pid: used / span for pid, used in others.items()}
    if sum(cores.values()) > most:
        found.append(_named(cores, after))
    unseen = _unseen(before, after)
    if unseen is not None and unseen / span > most:
        found.append(f"processes that have ended or cannot be seen from here used {unseen / span:.1f} cores")
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        found.append("processors were slowed for heat")
    return "; ".join(found) or None


def _used(before: Look, after: Look, ours: Collection[int]) -> dict[int, int]:
    """Ticks of others between two looks, by process."""
    found = {}
    for pid, now in after.processes.items():
        if pid in ours or _of_kernel(pid, now):
            continue
        used = now.used - _before(before, pid, now)
        if used > 0:
            found[pid] = used
    return found


def _unseen(before: Look, after: Look) -> int | None:
    """Ticks in the totals that belong to no process that was there at the end."""
    if before.busy is None or after.busy is None:
        return None
    seen = sum(now.used - _before(before, pid, now) for pid, now in after.processes.items())
    return after.busy - before.busy - seen


def _before(before: Look, pid: int, now: Ticks) -> int:
    then = before.processes.get(pid)
    return then.used if then is not None and then.started == now.started else 0


def _of_kernel(pid: int, ticks: Ticks) -> bool:
    return _KERNEL in (pid, ticks.parent)


def _named(cores: Mapping[int, float], after: Look) -> str:
    first, *rest = sorted(cores, key=lambda pid: -cores[pid])
    more = sum(cores[pid] for pid in rest)
    words = f"{after.processes[first].name} (pid {first}) used {cores[first]:.1f} cores"
    return words + (f", {len(rest)} others {more:.1f}" if more >= 0.05 else "")


def hot_cards(nvml: Any) -> tuple[int, ...]:
    """Cards that are slowed at this moment, not for their power limit: by number."""
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
    """Watches from `start` to `stop`."""

    def __init__(self, host: Host | None = None, nvml: Callable[[], Any] | None = None) -> None:
        """Watch this machine, or one that was recorded; cards only where their library is given."""
        self._host = host or LocalHost()
        self._nvml = nvml
        self._pids: tuple[int, ...] = ()
        self._before: Look | None = None

    def start(self, pids: Collection[int] = ()) -> None:
        """Watch from here on; these processes, ours and all below them are no disturbance."""
        self._pids = (os.getpid(), *pids)
        self._before = look(self._host)

    def stop(self) -> str | None:
        """What disturbed, in words; None: nothing to speak of."""
        if self._before is None:
            return None
        ours = {pid for root in self._pids for pid in (root, *descendants(root))}
        found = judge(self._before, look(self._host), ours, os.sysconf("SC_CLK_TCK"))
        hot = hot_cards(self._nvml()) if self._nvml is not None else ()
        if hot:
            found = "; ".join(filter(None, (found, f"GPU {', '.join(map(str, hot))} was slowed for heat or power")))
        return found
