"""Identifies processes by pid, start time and boot, because pids are reused."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_DEAD = ("Z", "X", "x")


@dataclass(frozen=True, slots=True)
class Pid:
    """One process."""

    pid: int
    ticks: int  # start time, in clock ticks since boot
    boot: str  # boot id

    @staticmethod
    def of(pid: int) -> "Pid | None":
        """The running process with this pid; None if there is none or it is a zombie."""
        stat = _stat(pid)
        return None if stat is None or stat.state in _DEAD else Pid(pid, stat.ticks, boot_id())

    @staticmethod
    def here(pid: int) -> "Pid | None":
        """The process with this pid, including zombies; None if there is none."""
        stat = _stat(pid)
        return None if stat is None else Pid(pid, stat.ticks, boot_id())

    @property
    def alive(self) -> bool:
        """Whether this process is running."""
        return Pid.of(self.pid) == self

    @property
    def stopped(self) -> bool:
        """Whether this process is stopped by a signal and can be resumed with SIGCONT."""
        stat = _stat(self.pid)
        return stat is not None and stat.state == "T" and stat.ticks == self.ticks

    def send(self, number: int) -> None:
        """Send a signal if this process is running."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    session: int
    ticks: int


def boot_id() -> str:
    """The kernel's boot id; empty if it is not available."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def descendants(root: int) -> tuple[int, ...]:
    """All descendants of a process, children first."""
    children: dict[int, list[int]] = {}
    for pid, stat in _all().items():
        children.setdefault(stat.parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return tuple(found)


def end_session(leader: Pid) -> None:
    """Kill the remaining processes of a session whose leader has exited."""
    for pid, stat in _all().items():
        if stat.session == leader.pid and stat.ticks >= leader.ticks:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _all() -> dict[int, _Stat]:
    found = {int(folder.name): _stat(int(folder.name)) for folder in _PROC.iterdir() if folder.name.isdigit()}
    return {pid: stat for pid, stat in found.items() if stat is not None}


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name in parentheses may contain spaces and parentheses
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19])) if len(fields) > 19 else None
