"""How a process ended, in words; killed for memory is told from killed by somebody as far as the kernel lets us.

Pure over a minder's report.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tokenmill.units import format_bytes

_KILLED_BY_SHELL = 128 + signal.SIGKILL  # how a shell or a container runtime reports SIGKILL
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
    """How a process ended. None: not known."""

    code: int | None = None
    signal: int | None = None
    asked: bool = False  # we ended it
    most_rss_bytes: int | None = None
    memory_bytes: int | None = None  # what it could have had at most
    kills: Mapping[str, int] | None = None  # kills for memory while it ran, by who counted them
    kernel: str | None = None  # the kernel's message about killing it

    @property
    def for_memory(self) -> bool | None:
        """Whether it was killed for memory; None: killed, and nothing speaks for or against it."""
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
    def from_outside(self) -> bool:
        """Whether somebody ended it, as far as is known: a request that crashes it looks otherwise."""
        return self.asked or (self.signal in (signal.SIGKILL, signal.SIGTERM) and not self.for_memory)

    def words(self, predicted_host_bytes: int | None = None) -> str:
        """For a tired operator, with what a plan had predicted for host memory where that matters."""
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
        if self.signal is None:
            return "ended, and nothing saw how" if self.code is None else f"ended with exit code {self.code}"
        name = {one.value: one.name for one in signal.Signals}.get(self.signal, f"signal {self.signal}")
        why = {one.value: words for one, words in _WHY.items()}.get(self.signal)
        if self.for_memory is None:
            why = "by somebody, or for memory: nothing tells which"
        return f"was killed by {name}" + (f" ({why})" if why else "")

    def _memory_words(self, predicted_host_bytes: int | None) -> str:
        sure = "" if self.kernel is not None else ", most likely"
        held = f" while holding {format_bytes(self.most_rss_bytes)}" if self.most_rss_bytes else ""
        of = f" of {format_bytes(self.memory_bytes)}" if held and self.memory_bytes else ""
        plan = f"; its plan counts on {format_bytes(predicted_host_bytes)} at most" if predicted_host_bytes else ""
        return f"was killed for memory{sure}{held}{of}{plan}"


def read_exit(path: Path) -> Exit | None:
    """A minder's report; None where there is none that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    names = {field.name for field in fields(Exit)}
    return (
        Exit(**{name: value for name, value in report.items() if name in names}) if isinstance(report, dict) else None
    )
