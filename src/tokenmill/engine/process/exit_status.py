"""Exit status of a process; distinguishes the OOM killer from other kills, as far as the kernel reports it.

`Exit` is what a supervisor reports. The other functions collect its values from /proc, cgroups and the kernel log.
"""

import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tokenmill.units import format_bytes

_SIGKILL_CODE = 128 + signal.SIGKILL  # exit code by which shells and container runtimes report SIGKILL
# Crashes do not raise these signals, so another process sent them; SIGKILL may be from the OOM killer.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OOM_SHARE = 0.8  # a killed process that used more of the memory was probably killed by the OOM killer

_WHY = {
    signal.SIGKILL: "by another process; the kernel counted no out-of-memory kill",
    signal.SIGSEGV: "invalid memory access: a bug or a broken build",
    signal.SIGABRT: "it aborted; see the last lines of its log",
    signal.SIGILL: "the build uses instructions that this processor does not support",
    signal.SIGBUS: "a mapped file was truncated, or its disk or /dev/shm is full or failing",
    signal.SIGFPE: "division by zero",
}


@dataclass(frozen=True, slots=True)
class Exit:
    """Exit status of a process. None: unknown."""

    code: int | None = None
    signal: int | None = None
    asked: bool = False  # tokenmill stopped it
    most_rss_bytes: int | None = None  # peak
    memory_bytes: int | None = None  # memory limit
    kills: Mapping[str, int] | None = None  # out-of-memory kills while it ran, by counter (system, cgroup)
    kernel: str | None = None  # the kernel's log message about killing it
    supervisor_signal: int | None = None  # signal that killed the supervisor, and so the engine (PR_SET_PDEATHSIG)

    @property
    def for_memory(self) -> bool | None:
        """Whether the OOM killer killed it; None: unknown who sent the signal."""
        if self.kernel is not None:
            return True
        if self.asked or (self.signal != signal.SIGKILL and self.code != _SIGKILL_CODE):
            return False
        if any((self.kills or {}).values()):
            return True
        if self.most_rss_bytes and self.memory_bytes and self.most_rss_bytes > _OOM_SHARE * self.memory_bytes:
            return True
        return False if self.kills else None

    @property
    def from_outside(self) -> bool | None:
        """Whether another process ended it, so that no request can be the cause; None: unknown.

        False for the OOM killer, because the engine itself used the memory. None for exit code 0, because some servers
        also shut down cleanly after an internal failure.
        """
        if self.asked or self.supervisor_signal is not None:
            return True
        if self.signal in _SENT or self.code in [128 + number for number in _SENT]:
            return None if self.for_memory is None else not self.for_memory
        return None if self.signal is None and not self.code else False

    def describe(self, predicted_host_bytes: int | None = None) -> str:
        """Describe the exit status as a predicate: `was killed by SIGKILL (...)`."""
        if self.asked:
            return "was stopped"
        if self.for_memory:
            return self._memory_words(predicted_host_bytes)
        return self._plain_words() + (
            "; the OOM killer killed a process meanwhile, possibly one of the engine's"
            if any((self.kills or {}).values())
            else ""
        )

    def _plain_words(self) -> str:
        if self.supervisor_signal is not None:
            return f"was killed because its supervisor was killed by {_name(self.supervisor_signal)}"
        if self.signal is None:
            return "exited with an unknown status" if self.code is None else f"exited with code {self.code}"
        why = {number.value: words for number, words in _WHY.items()}.get(self.signal)
        if self.for_memory is None:
            why = "by another process or by the OOM killer"
        return f"was killed by {_name(self.signal)}" + (f" ({why})" if why else "")

    def _memory_words(self, predicted_host_bytes: int | None) -> str:
        probably = "" if self.kernel is not None else " probably"
        held = f" while using {format_bytes(self.most_rss_bytes)}" if self.most_rss_bytes else ""
        of = f" of {format_bytes(self.memory_bytes)}" if held and self.memory_bytes else ""
        plan = f"; its plan predicts at most {format_bytes(predicted_host_bytes)}" if predicted_host_bytes else ""
        return f"was{probably} killed by the OOM killer{held}{of}{plan}"


def engine_from_outside(exit_status: Exit | None, kind: str) -> bool | None:
    """`Exit.from_outside` of an engine of this kind; None: unknown."""
    if exit_status is None:
        return None
    # llama.cpp servers and the native worker exit with 0 only when stopped; vLLM also after an internal failure
    return True if exit_status.code == 0 and kind != "vllm" else exit_status.from_outside


def _name(number: int) -> str:
    return {one.value: one.name for one in signal.Signals}.get(number, f"signal {number}")


def read_exit(path: Path) -> Exit | None:
    """Read a supervisor's report; None if it is missing or unreadable."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    names = {field.name for field in fields(Exit)}
    return (
        Exit(**{name: value for name, value in report.items() if name in names}) if isinstance(report, dict) else None
    )


_KERNEL_LOG_BYTES = 1 << 20  # maximum that is read


def kill_counts(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Out-of-memory kills so far, in the system and in the caller's cgroup; omits counters that cannot be read."""
    counts: dict[str, int] = {}
    system = counter(_text(proc / "vmstat"), "oom_kill")
    if system is not None:
        counts["system"] = system
    for path in event_files(_text(proc / "self/cgroup"), cgroups):
        own = counter(_text(path), "oom_kill")
        if own is not None:
            counts["cgroup"] = own
            break
    return counts


def counter(text: str, name: str) -> int | None:
    """The value of a name in a file of `name number` lines; None if it is missing."""
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def event_files(membership: str, cgroups: Path) -> list[Path]:
    """Files that count the out-of-memory kills of a cgroup: version 2, and the memory controller of version 1."""
    files = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if number == "0" and not controllers:
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def memory_limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that the caller can use: the machine's, or the smallest limit of its cgroup and the parents."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    for events in event_files(_text(proc / "self/cgroup"), cgroups):
        name = "memory.max" if events.name == "memory.events" else "memory.limit_in_bytes"
        folder = events.parent
        while folder.is_relative_to(cgroups):
            limit = _text(folder / name).strip()
            if limit.isdigit():
                limits.append(int(limit))
            if folder == cgroups:
                break
            folder = folder.parent
    return min(limits, default=None)


def kernel_line(pid: int, since_s: float, path: str = "/dev/kmsg") -> str | None:
    """The kernel's message about killing a process; None if there is none or its log cannot be read.

    since_s: start of the process on the monotonic clock; earlier messages are about another process with the same pid.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    seen = 0
    found: str | None = None
    try:
        while seen < _KERNEL_LOG_BYTES:
            # one record per read; EPIPE: records were overwritten meanwhile
            try:
                record = os.read(log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue
            if not record:
                break
            seen += len(record)
            if recorded_s(record) >= since_s:
                found = killed_line(record, pid) or found
    except OSError:
        return found  # EAGAIN: end of the log
    finally:
        os.close(log)
    return found


def recorded_s(record: str) -> float:
    """Timestamp of a /dev/kmsg record: `level,number,microseconds,flags;text`."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0


def killed_line(text: str, pid: int) -> str | None:
    """Find the line `... out of memory: Killed process 12 (llama-server) ...` in a kernel log."""
    found = re.search(rf"(?:Memory cgroup out|Out) of memory: Killed process {pid} [^\n]*", text)
    return found[0] if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
