"""Signs that the kernel killed a process for memory: counters that any user may read, and its message where readable.

Reads text and small files; decides nothing. Uses the standard library alone, for the minder that starts with it.
"""

import os
import re
from pathlib import Path

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
