"""How a process exited, in words; distinguishes the OOM killer from other kills as far as the kernel reports it.

Pure over a supervisor's report.
"""

import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tokenmill.units import format_bytes

_KILLED_BY_SHELL = 128 + signal.SIGKILL  # how a shell or a container runtime reports SIGKILL
# No crash raises these, so another process sent them; SIGKILL may also be the OOM killer's.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NEARLY_ALL = 0.8  # of the memory there is: what held that when it was killed was likely killed for it

_WHY = {
    signal.SIGKILL: "by somebody; not for memory, as far as the kernel counts",
    signal.SIGSEGV: "it touched memory that is not its own: a bug or a broken build",
    signal.SIGABRT: "it gave up by itself; the last lines of its log say why",
    signal.SIGILL: "the build uses instructions that this processor lacks",
    signal.SIGBUS: "a mapped file became shorter, or its disk or /dev/shm is full or failing",
    signal.SIGFPE: "a division by zero",
}


@dataclass(frozen=True, slots=True)
class Exit:
    """Exit status of a process. None: unknown."""

    code: int | None = None
    signal: int | None = None
    asked: bool = False  # we ended it
    most_rss_bytes: int | None = None
    memory_bytes: int | None = None  # what it could have had at most
    kills: Mapping[str, int] | None = None  # kills for memory while it ran, by who counted them
    kernel: str | None = None  # the kernel's message about killing it
    supervisor_signal: int | None = None  # killed the supervisor, and the engine with it (PR_SET_PDEATHSIG)

    @property
    def for_memory(self) -> bool | None:
        """Whether the OOM killer killed it; None: killed by an unknown sender."""
        if self.kernel is not None:
            return True
        if self.asked or (self.signal != signal.SIGKILL and self.code != _KILLED_BY_SHELL):
            return False
        if any((self.kills or {}).values()):
            return True
        if self.most_rss_bytes and self.memory_bytes and self.most_rss_bytes > _NEARLY_ALL * self.memory_bytes:
            return True
        return False if self.kills else None

    @property
    def from_outside(self) -> bool | None:
        """Whether another process ended it, so that no request can be the cause; None: unknown.

        A kill by the OOM killer is not from outside, because the engine itself used the memory. A clean exit (code 0)
        is unknown here: some servers also shut down cleanly after an internal failure.
        """
        if self.asked or self.supervisor_signal is not None:
            return True
        if self.signal in _SENT or self.code in [128 + number for number in _SENT]:
            return None if self.for_memory is None else not self.for_memory
        return None if self.signal is None and not self.code else False

    def words(self, predicted_host_bytes: int | None = None) -> str:
        """Return the exit status as a sentence, with the predicted host memory if the process ran out of it."""
        if self.asked:
            return "was stopped"
        if self.for_memory:
            return self._memory_words(predicted_host_bytes)
        return self._plain_words() + (
            "; a process was killed for memory meanwhile, perhaps one of its own"
            if any((self.kills or {}).values())
            else ""
        )

    def _plain_words(self) -> str:
        if self.supervisor_signal is not None:
            return f"was killed because its supervisor was killed by {_name(self.supervisor_signal)}"
        if self.signal is None:
            return "ended, and nothing saw how" if self.code is None else f"ended with exit code {self.code}"
        why = {one.value: words for one, words in _WHY.items()}.get(self.signal)
        if self.for_memory is None:
            why = "by somebody, or for memory: nothing tells which"
        return f"was killed by {_name(self.signal)}" + (f" ({why})" if why else "")

    def _memory_words(self, predicted_host_bytes: int | None) -> str:
        sure = "" if self.kernel is not None else ", most likely"
        held = f" while holding {format_bytes(self.most_rss_bytes)}" if self.most_rss_bytes else ""
        of = f" of {format_bytes(self.memory_bytes)}" if held and self.memory_bytes else ""
        plan = f"; its plan counts on {format_bytes(predicted_host_bytes)} at most" if predicted_host_bytes else ""
        return f"was killed for memory{sure}{held}{of}{plan}"


def engine_from_outside(end: Exit | None, kind: str) -> bool | None:
    """`Exit.from_outside` of an engine of this kind; None: unknown, as for an end that nothing has reported."""
    if end is None:
        return None
    # llama.cpp's servers and the native worker exit with 0 only when told to; vLLM also after a failure of its engine
    return True if end.code == 0 and kind != "vllm" else end.from_outside


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


_KERNEL_BYTES = 1 << 20  # of its messages, at most


def kill_counts(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Kills for memory so far: of the whole system, and of the caller's own cgroup; what cannot be read is left out."""
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
    """The number behind a name in a file of `name number` lines."""
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def event_files(membership: str, cgroups: Path) -> list[Path]:
    """Where the caller's cgroup counts its kills, by /proc/self/cgroup: version 2, and the memory controller of 1."""
    files = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if number == "0" and not controllers:
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def memory_limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of the machine's memory and the limits of the caller's cgroup and those above it."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    for events in event_files(_text(proc / "self/cgroup"), cgroups):
        name = "memory.max" if events.name == "memory.events" else "memory.limit_in_bytes"
        folder = events.parent
        while folder.is_relative_to(cgroups):
            said = _text(folder / name).strip()
            if said.isdigit():
                limits.append(int(said))
            if folder == cgroups:
                break
            folder = folder.parent
    return min(limits, default=None)


def kernel_line(pid: int, since_s: float, path: str = "/dev/kmsg") -> str | None:
    """The kernel's own message about killing a process, where the caller may read its log.

    `since_s` is on the monotonic clock, as the kernel's are: an older message is about an older process.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    seen = 0
    found: str | None = None
    try:
        while seen < _KERNEL_BYTES:
            # one record a read; EPIPE says that some were overwritten meanwhile
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
        return found  # EAGAIN: the end of what there is
    finally:
        os.close(log)
    return found


def recorded_s(record: str) -> float:
    """When a record of /dev/kmsg was made: `level,number,microseconds,flags;text`."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0


def killed_line(text: str, pid: int) -> str | None:
    """`Memory cgroup out of memory: Killed process 12 (llama-server) ...` out of a kernel log."""
    found = re.search(rf"(?:Memory cgroup out|Out) of memory: Killed process {pid} [^\n]*", text)
    return found[0] if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
