"""Processes known for sure: a number is used again, a number with its start time on one boot is not."""

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
    ticks: int  # since boot, when it started
    boot: str

    @staticmethod
    def of(pid: int) -> "Pid | None":
        """The process that has this number now; None: none has, or it has ended and waits to be reaped."""
        stat = _stat(pid)
        return None if stat is None or stat.state in _DEAD else Pid(pid, stat.ticks, boot_id())

    @staticmethod
    def here(pid: int) -> "Pid | None":
        """The process that has this number, ended or not."""
        stat = _stat(pid)
        return None if stat is None else Pid(pid, stat.ticks, boot_id())

    @property
    def alive(self) -> bool:
        """Whether that very process runs."""
        return Pid.of(self.pid) == self

    @property
    def stopped(self) -> bool:
        """Whether that very process is stopped by a signal and can be resumed with SIGCONT."""
        stat = _stat(self.pid)
        return stat is not None and stat.state == "T" and stat.ticks == self.ticks

    def send(self, number: int) -> None:
        """Signal that very process, if it is still there."""
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
    """This boot's name; empty where the kernel tells none."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def descendants(root: int) -> tuple[int, ...]:
    """Every process below one, nearest first; those that end meanwhile are left out."""
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
    """SIGKILL to what is left of a session whose leader has just ended."""
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
    # the name in brackets may hold anything, brackets and spaces too
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19])) if len(fields) > 19 else None
