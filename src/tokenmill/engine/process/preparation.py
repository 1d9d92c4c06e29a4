"""Kernel settings of an engine process, applied before exec: priority, scheduling, cores, memory nodes, locks.

A `Preparation` is made from a plan and the configuration, passed to the child as one argument (`encode`), and applied
there just before exec, which preserves all settings. A setting that the kernel refuses becomes a sentence that names
the missing right and how to grant it, and the engine starts without it. This module has no slow imports, because the
child loads it at every start.
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
from tokenmill.units import format_bytes

Scheduling = Literal["normal", "batch", "rr"]
HIGHEST_NICE = -20
LOWEST_NICE = 19
RR_PRIORITY = 1
"""The lowest real-time priority: it already runs before every ordinary process. 99, which is often advised, also runs
before the kernel's own watchdog and migration threads, and a hung engine then takes the machine with it."""

OOM_SCORE_ADJ = 1000
"""The kernel kills the engine first when memory runs out: tokenmill restarts it, and no answer is lost."""

CAP_IPC_LOCK, CAP_SYS_NICE, CAP_SYS_RESOURCE = 14, 23, 24  # include/uapi/linux/capability.h
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3  # include/uapi/linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; glibc has no wrapper
_MOST_CPUS = 1 << 15
_MOST_NODES = 1024
_RANGES = {
    "nice": (HIGHEST_NICE, LOWEST_NICE),
    "cpus": (0, _MOST_CPUS - 1),
    "nodes": (0, _MOST_NODES - 1),
    "memlock_bytes": (0, sys.maxsize),
    "oom_score_adj": (-1000, 1000),
}
_AUTOGROUP_S = 3.0
_AUTOGROUP_PAUSE_S = 0.05
_LIMITS_FILE = "/etc/security/limits.d/tokenmill.conf"


@dataclass(frozen=True, slots=True)
class Preparation:
    """The settings to apply; None leaves a setting unchanged."""

    nice: int | None = None  # absolute
    scheduling: Scheduling = "normal"
    cpus: tuple[int, ...] | None = None  # logical CPUs to keep to
    nodes: tuple[int, ...] | None = None  # NUMA nodes that memory comes from
    interleave: bool = False  # page by page over these nodes, instead of from these nodes alone
    memlock_bytes: int | None = None  # what the engine will lock
    oom_score_adj: int | None = None  # 1000: killed first when memory runs out
    group: str | None = None  # folder of a control group to be in

    def apply(self) -> tuple[str, ...]:
        """Apply all settings to this thread and its later program; return what the kernel refused, in words."""
        notes: list[str] = []
        for wanted, ask in (
            (self.group is not None, self._join),
            (self.oom_score_adj is not None, self._oom),
            (self.memlock_bytes is not None, self._memlock),
            (self.cpus is not None, self._cpus),
            (self.nodes is not None, self._nodes),
            (self.nice is not None, self._nice),
            (self.scheduling != "normal", self._schedule),
        ):
            if wanted and (note := ask()):
                notes.append(note)
        return tuple(notes)

    def as_words(self) -> tuple[str, ...]:
        """Return one description per setting, for users."""
        words = []
        if self.nice is not None:
            words.append(f"nice {self.nice}")
        if self.scheduling != "normal":
            words.append({"rr": "real-time round robin", "batch": "batch scheduling"}[self.scheduling])
        if self.cpus is not None:
            words.append(f"CPUs {_ranges(self.cpus)}")
        if self.nodes is not None:
            way = "memory spread over" if self.interleave else "memory from"
            words.append(f"{way} NUMA node{'s' if len(self.nodes) > 1 else ''} {_ranges(self.nodes)}")
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
        said = {name: value for name, value in asdict(self).items() if value != getattr(unset, name)}
        return json.dumps(said, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> "Preparation":
        """Decode the output of `encode`; UsageError for anything else."""
        try:
            said = json.loads(text)
        except ValueError as error:
            raise UsageError(f"a preparation is JSON, and this is not: {text!r}") from error
        known = {field.name for field in fields(Preparation)}
        if not isinstance(said, dict) or not said.keys() <= known:
            raise UsageError(f"not a preparation: {text!r}", hint=f"its keys are {', '.join(sorted(known))}")
        for name, value in said.items():
            if not _acceptable(name, value):
                raise UsageError(f"a preparation's {name} cannot be {value!r}")
            if isinstance(value, list):
                said[name] = tuple(value)
        return Preparation(**said)

    def _join(self) -> str | None:
        try:
            Path(self.group or "", "cgroup.procs").write_text("0")  # who writes it
        except OSError as error:
            return f"the control group {self.group} was refused ({_why(error)}): its limits do not hold"
        return None

    def _oom(self) -> str | None:
        try:
            Path("/proc/self/oom_score_adj").write_text(str(self.oom_score_adj))
        except OSError as error:
            return (
                f"out-of-memory score {self.oom_score_adj:+d} was refused ({_why(error)}): lowering it needs "
                "CAP_SYS_RESOURCE; OOMScoreAdjust= in a systemd unit sets it"
            )
        return None

    def _memlock(self) -> str | None:
        wanted = self.memlock_bytes or 0
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if _reaches(soft, wanted) or _keeps_right(CAP_IPC_LOCK):
            return None
        most = hard if _reaches(hard, wanted) else wanted
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
        except (OSError, ValueError):  # ValueError is Python's word for "not allowed to raise maximum limit"
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))  # as far as it goes without a right
            return (
                f"{format_bytes(wanted)} cannot be locked, the hard limit is {format_bytes(hard)}: {memlock_remedy()}"
            )
        return None

    def _cpus(self) -> str | None:
        wanted = set(self.cpus or ())
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError) as error:  # ValueError: none at all
            return f"CPUs {_ranges(wanted)} were refused ({_why(error)}): this process may use {_ranges(_allowed())}"
        lost = wanted - _allowed()  # the kernel quietly leaves out what a cpuset forbids
        if lost:
            return (
                f"CPUs {_ranges(lost)} are not ours to use (a cpuset, or switched off): bound to {_ranges(_allowed())}"
            )
        return None

    def _nodes(self) -> str | None:
        nodes = self.nodes or ()
        try:
            set_memory_nodes(nodes, interleave=self.interleave)
        except OSError as error:
            way = "spreading memory over" if self.interleave else "taking memory from"
            return (
                f"{way} NUMA nodes {_ranges(nodes)} was refused ({_why(error)}): a container needs "
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
                f"nice {wanted} holds inside the engine's session alone: for the session it was refused "
                f"({_why(error)}), and kernel.sched_autogroup_enabled = 1 shares processors out to sessions "
                "first"
            )
        return None

    def _schedule(self) -> str | None:
        rr = self.scheduling == "rr"
        policy, priority = (os.SCHED_RR, RR_PRIORITY) if rr else (os.SCHED_BATCH, 0)
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError as error:
            return f"{'real-time' if rr else 'batch'} scheduling was refused ({_why(error)}): {rr_remedy()}"
        if rr and self.cpus is None and _every_core_is_ours():
            return (
                "real-time scheduling without reserved cores: a busy engine leaves the rest of the machine 5 % "
                "(kernel.sched_rt_runtime_us); reserve cores in the plan"
            )
        return None


def nice_remedy(nice: int) -> str:
    """How to be allowed a negative nice."""
    return (
        f"it needs CAP_SYS_NICE or a limit: sudo prlimit --pid $$ --nice={20 - nice} for this shell, "
        f"LimitNICE={nice} in a systemd unit, `USER - nice {nice}` in {_LIMITS_FILE}, "
        "--cap-add=SYS_NICE for a container"
    )


def rr_remedy() -> str:
    """How to be allowed real-time scheduling."""
    return (
        f"it needs CAP_SYS_NICE or a limit: sudo prlimit --pid $$ --rtprio={RR_PRIORITY} for this shell, "
        f"LimitRTPRIO={RR_PRIORITY} in a systemd unit, `USER - rtprio {RR_PRIORITY}` in {_LIMITS_FILE}, "
        "--cap-add=SYS_NICE for a container; root too is refused in a control group without real-time "
        "budget (cpu.rt_runtime_us)"
    )


def memlock_remedy() -> str:
    """How to be allowed to lock memory."""
    return (
        "sudo prlimit --pid $$ --memlock=unlimited for this shell, LimitMEMLOCK=infinity in a systemd unit, "
        f"`USER - memlock unlimited` in {_LIMITS_FILE}, --ulimit memlock=-1 for a container"
    )


def set_session_nice(nice: int, pid: int | None = None) -> None:
    """Rank a process's session among the others, where the kernel shares processors out to sessions first (autogroup).

    There the nice of a process counts among those of its session alone. Default: this one's. OSError where it is
    refused.
    """
    group = Path("/proc", "self" if pid is None else str(pid), "autogroup")
    ends_s = time.monotonic() + _AUTOGROUP_S
    while group.exists():
        try:
            group.write_text(str(nice))
        except BlockingIOError:  # of all sessions together the kernel takes ten of these a second
            if time.monotonic() > ends_s:
                raise
            time.sleep(_AUTOGROUP_PAUSE_S)
        else:
            return


def set_memory_nodes(nodes: tuple[int, ...], *, interleave: bool) -> None:
    """Take this thread's new pages, page cache included, from these nodes; OSError where that is not possible."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if not nodes or min(nodes) < 0 or max(nodes) >= _MOST_NODES:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    mask = sum(1 << node for node in nodes).to_bytes(_MOST_NODES // 8, sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    policy = _MPOL_INTERLEAVE if interleave else _MPOL_BIND
    if libc.syscall(ctypes.c_long(call), ctypes.c_int(policy), mask, ctypes.c_ulong(_MOST_NODES)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _acceptable(name: str, value: Any) -> bool:
    def whole(item: object) -> bool:
        least, most = _RANGES[name]
        return isinstance(item, int) and not isinstance(item, bool) and least <= item <= most

    if name == "scheduling":
        return value in get_args(Scheduling)
    if name == "interleave":
        return isinstance(value, bool)
    if name == "group":
        return value is None or (isinstance(value, str) and value.startswith("/"))
    if name in ("cpus", "nodes"):
        return value is None or (isinstance(value, list) and all(map(whole, value)))
    return value is None or whole(value)


def _keeps_right(capability: int) -> bool:
    """Whether a capability is there after exec: root gets what is in its bounding set, others keep ambient ones."""
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


def _every_core_is_ours() -> bool:
    return len(_allowed()) == os.cpu_count()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _ranges(numbers: set[int] | tuple[int, ...]) -> str:
    from tokenmill.launch.binding import ranges  # noqa: PLC0415  only for words

    return ranges(numbers)
