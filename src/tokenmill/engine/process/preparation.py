"""Kernel settings of an engine process, applied before exec: priority, scheduling, cores, memory nodes, locks.

A `Preparation` is created from a plan and the configuration, passed to the child as one argument (`encode`), and
applied just before exec, which preserves all settings. If the kernel refuses a setting, the engine starts without it,
and a note names the missing permission and how to grant it. This module must have no slow imports, because every child
loads it.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from tokenmill.errors import UsageError
from tokenmill.units import format_bytes, format_ranges

Scheduling = Literal["normal", "batch", "rr"]
HIGHEST_NICE = -20
LOWEST_NICE = 19
RR_PRIORITY = 1
"""The lowest real-time priority, which precedes all ordinary processes. The often recommended 99 also precedes the
kernel's watchdog and migration threads, so that a hung engine hangs the machine."""

OOM_SCORE_ADJ = 1000
"""Makes the OOM killer choose the engine first: tokenmill restarts it without losing answers."""

CAP_IPC_LOCK, CAP_SYS_NICE, CAP_SYS_RESOURCE = 14, 23, 24  # include/uapi/linux/capability.h
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3  # include/uapi/linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; glibc has no wrapper
_MAX_CPUS = 1 << 15
_MAX_NODES = 1024
_RANGES = {
    "nice": (HIGHEST_NICE, LOWEST_NICE),
    "cpus": (0, _MAX_CPUS - 1),
    "nodes": (0, _MAX_NODES - 1),
    "memlock_bytes": (0, sys.maxsize),
    "oom_score_adj": (-1000, 1000),
}
_AUTOGROUP_TIMEOUT_S = 3.0
_AUTOGROUP_RETRY_S = 0.05
_LIMITS_FILE = "/etc/security/limits.d/tokenmill.conf"


@dataclass(frozen=True, slots=True)
class Preparation:
    """The settings to apply; None leaves a setting unchanged."""

    nice: int | None = None  # absolute
    scheduling: Scheduling = "normal"
    cpus: tuple[int, ...] | None = None  # logical CPUs that the process may use
    nodes: tuple[int, ...] | None = None  # NUMA nodes of its memory
    interleave: bool = False  # interleave pages over the nodes, instead of binding to them
    memlock_bytes: int | None = None  # memory that the engine will lock
    oom_score_adj: int | None = None  # 1000: killed first when memory runs out
    group: str | None = None  # folder of the control group to join

    def apply(self) -> tuple[str, ...]:
        """Apply all settings to this thread and the program it executes; returns a note for each refused setting."""
        notes: list[str] = []
        for wanted, setting in (
            (self.group is not None, self._join),
            (self.oom_score_adj is not None, self._oom),
            (self.memlock_bytes is not None, self._memlock),
            (self.cpus is not None, self._cpus),
            (self.nodes is not None, self._nodes),
            (self.nice is not None, self._nice),
            (self.scheduling != "normal", self._schedule),
        ):
            if wanted and (note := setting()):
                notes.append(note)
        return tuple(notes)

    def describe(self) -> tuple[str, ...]:
        """Return one description per setting, for users."""
        words = []
        if self.nice is not None:
            words.append(f"nice {self.nice}")
        if self.scheduling != "normal":
            words.append({"rr": "real-time round robin", "batch": "batch scheduling"}[self.scheduling])
        if self.cpus is not None:
            words.append(f"CPUs {format_ranges(self.cpus)}")
        if self.nodes is not None:
            policy = "memory interleaved over" if self.interleave else "memory on"
            words.append(f"{policy} NUMA node{'s' if len(self.nodes) > 1 else ''} {format_ranges(self.nodes)}")
        if self.memlock_bytes is not None:
            words.append(f"{format_bytes(self.memlock_bytes)} of memory may be locked")
        if self.oom_score_adj is not None:
            words.append(f"out-of-memory score {self.oom_score_adj:+d}")
        if self.group is not None:
            words.append(f"control group {self.group}")
        return tuple(words)

    def encode(self) -> str:
        """Encode as one argument; the empty preparation is `{}`."""
        unset = Preparation()
        changed = {name: value for name, value in asdict(self).items() if value != getattr(unset, name)}
        return json.dumps(changed, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> "Preparation":
        """Decode the output of `encode`; UsageError for any other text."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UsageError(f"not a preparation, because it is not JSON: {text!r}") from error
        known = {field.name for field in fields(Preparation)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise UsageError(f"not a preparation: {text!r}", hint=f"allowed keys: {', '.join(sorted(known))}")
        for name, value in values.items():
            if not _acceptable(name, value):
                raise UsageError(f"invalid {name} in a preparation: {value!r}")
            if isinstance(value, list):
                values[name] = tuple(value)
        return Preparation(**values)

    def _join(self) -> str | None:
        try:
            Path(self.group or "", "cgroup.procs").write_text("0")  # the writing process
        except OSError as error:
            return f"cannot join the control group {self.group} ({_why(error)}): its limits are not enforced"
        return None

    def _oom(self) -> str | None:
        try:
            Path("/proc/self/oom_score_adj").write_text(str(self.oom_score_adj))
        except OSError as error:
            return (
                f"out-of-memory score {self.oom_score_adj:+d} was refused ({_why(error)}): a lower score needs "
                "CAP_SYS_RESOURCE or OOMScoreAdjust= in a systemd unit"
            )
        return None

    def _memlock(self) -> str | None:
        wanted = self.memlock_bytes or 0
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if _reaches(soft, wanted) or _keeps_capability(CAP_IPC_LOCK):
            return None
        limit = hard if _reaches(hard, wanted) else wanted
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        except (OSError, ValueError):  # ValueError: not allowed to raise the hard limit
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))  # the maximum without a capability
            return (
                f"{format_bytes(wanted)} cannot be locked, the hard limit is {format_bytes(hard)}: {memlock_remedy()}"
            )
        return None

    def _cpus(self) -> str | None:
        wanted = set(self.cpus or ())
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError) as error:  # ValueError: no CPU in the set exists
            allowed = format_ranges(_allowed())
            return f"CPUs {format_ranges(wanted)} were refused ({_why(error)}): this process may use {allowed}"
        lost = wanted - _allowed()  # the kernel silently drops CPUs that a cpuset forbids
        if lost:
            used = format_ranges(_allowed())
            return f"CPUs {format_ranges(lost)} are offline or excluded by a cpuset: the engine uses {used}"
        return None

    def _nodes(self) -> str | None:
        nodes = self.nodes or ()
        try:
            set_memory_nodes(nodes, interleave=self.interleave)
        except OSError as error:
            policy = "interleaving memory over" if self.interleave else "binding memory to"
            return (
                f"{policy} NUMA nodes {format_ranges(nodes)} was refused ({_why(error)}): a container needs "
                "--cap-add=SYS_NICE, and a cpuset may forbid a node"
            )
        return None

    def _nice(self) -> str | None:
        wanted = self.nice or 0
        try:
            os.setpriority(os.PRIO_PROCESS, 0, wanted)
        except OSError as error:
            return f"nice {wanted} was refused ({_why(error)}): {nice_remedy(wanted)}"
        try:
            if os.getsid(0) == os.getpid():
                set_session_nice(wanted)
        except OSError as error:
            return (
                f"nice {wanted} only applies within the engine's session: setting it for the session was refused "
                f"({_why(error)}), and kernel.sched_autogroup_enabled = 1 divides CPU time between sessions first"
            )
        return None

    def _schedule(self) -> str | None:
        rr = self.scheduling == "rr"
        policy, priority = (os.SCHED_RR, RR_PRIORITY) if rr else (os.SCHED_BATCH, 0)
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError as error:
            return f"{'real-time' if rr else 'batch'} scheduling was refused ({_why(error)}): {rr_remedy()}"
        if rr and self.cpus is None and _may_use_all_cpus():
            return (
                "real-time scheduling without reserved cores: a busy engine leaves 5 % of CPU time to other programs "
                "(kernel.sched_rt_runtime_us); use --reserve-cores"
            )
        return None


def nice_remedy(nice: int) -> str:
    """How to permit a negative nice value."""
    return (
        f"it needs CAP_SYS_NICE or a limit: sudo prlimit --pid $$ --nice={20 - nice} for this shell, "
        f"LimitNICE={nice} in a systemd unit, `USER - nice {nice}` in {_LIMITS_FILE}, "
        "--cap-add=SYS_NICE for a container"
    )


def rr_remedy() -> str:
    """How to permit real-time scheduling."""
    return (
        f"it needs CAP_SYS_NICE or a limit: sudo prlimit --pid $$ --rtprio={RR_PRIORITY} for this shell, "
        f"LimitRTPRIO={RR_PRIORITY} in a systemd unit, `USER - rtprio {RR_PRIORITY}` in {_LIMITS_FILE}, "
        "--cap-add=SYS_NICE for a container; in a control group without a real-time budget (cpu.rt_runtime_us) "
        "even root is refused"
    )


def memlock_remedy() -> str:
    """How to permit locked memory."""
    return (
        "sudo prlimit --pid $$ --memlock=unlimited for this shell, LimitMEMLOCK=infinity in a systemd unit, "
        f"`USER - memlock unlimited` in {_LIMITS_FILE}, --ulimit memlock=-1 for a container"
    )


def set_session_nice(nice: int, pid: int | None = None) -> None:
    """Set the nice value of a process's session (autogroup); default: of this process. OSError if it is refused.

    With autogroups the kernel divides CPU time between sessions first, and a process's own nice value only applies
    within its session.
    """
    group = Path("/proc", "self" if pid is None else str(pid), "autogroup")
    ends_s = time.monotonic() + _AUTOGROUP_TIMEOUT_S
    while group.exists():
        try:
            group.write_text(str(nice))
        except BlockingIOError:  # the kernel accepts ten writes per second
            if time.monotonic() > ends_s:
                raise
            time.sleep(_AUTOGROUP_RETRY_S)
        else:
            return


def set_memory_nodes(nodes: tuple[int, ...], *, interleave: bool) -> None:
    """Allocate this thread's new pages, including page cache, on these NUMA nodes; OSError if that is not possible."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if not nodes or min(nodes) < 0 or max(nodes) >= _MAX_NODES:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    mask = sum(1 << node for node in nodes).to_bytes(_MAX_NODES // 8, sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    policy = _MPOL_INTERLEAVE if interleave else _MPOL_BIND
    if libc.syscall(ctypes.c_long(call), ctypes.c_int(policy), mask, ctypes.c_ulong(_MAX_NODES)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _acceptable(name: str, value: Any) -> bool:
    def whole(item: object) -> bool:
        low, high = _RANGES[name]
        return isinstance(item, int) and not isinstance(item, bool) and low <= item <= high

    if name == "scheduling":
        return value in get_args(Scheduling)
    if name == "interleave":
        return isinstance(value, bool)
    if name == "group":
        return value is None or (isinstance(value, str) and value.startswith("/"))
    if name in ("cpus", "nodes"):
        return value is None or (isinstance(value, list) and all(map(whole, value)))
    return value is None or whole(value)


def _keeps_capability(capability: int) -> bool:
    """Whether a capability is kept after exec: root keeps its bounding set, other users their ambient set."""
    kept = "CapBnd" if os.geteuid() == 0 else "CapAmb"
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == kept:
            return bool(int(value, 16) >> capability & 1)
    return False


def _reaches(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _allowed() -> set[int]:
    return os.sched_getaffinity(0)


def _may_use_all_cpus() -> bool:
    return len(_allowed()) == os.cpu_count()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
