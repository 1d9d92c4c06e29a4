"""The result of a check: how bad it is, what was seen, why it matters, and the exact commands.

A check is a pure function from `Facts` to a `CheckResult`, or to None where the machine has no such thing. What cannot
be seen is `unknown` and names a way to see it; it never counts as fine.
"""

from dataclasses import dataclass
from typing import Literal

from tokenmill.units import format_seconds

Severity = Literal["problem", "advice", "fine", "unknown"]
SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "unknown", "fine")
"""Most urgent first. A problem costs a lot now or will fail; advice could be better; both carry commands."""

When = Literal["now", "for good", "look", "by hand"]

SYSCTL_FILE = "/etc/sysctl.d/90-tokenmill.conf"
TMPFILES_FILE = "/etc/tmpfiles.d/tokenmill.conf"
LIMITS_FILE = "/etc/security/limits.d/tokenmill.conf"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One command or line of a file, ready to copy; by hand: what no command does."""

    when: When
    command: str
    note: str | None = None  # where it goes, what it is for

    @property
    def root(self) -> bool:
        """Whether it needs root."""
        return self.command.startswith("sudo ") or " sudo " in self.command


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    check: str  # the same name in every version: swap, memlock, gpu-link
    severity: Severity
    seen: str  # with numbers
    why: str | None = None  # one sentence, with the size of the effect where it is known
    source: str | None = None  # of that
    remedies: tuple[Remedy, ...] = ()


def sysctl(name: str, value: int) -> tuple[Remedy, ...]:
    """Set a kernel parameter, until the next start and beyond."""
    return (
        Remedy("now", f"sudo sysctl -w {name}={value}"),
        Remedy("for good", f"echo '{name} = {value}' | sudo tee -a {SYSCTL_FILE}"),
    )


def sysfs(path: str, value: str) -> tuple[Remedy, ...]:
    """Write to a file of the kernel's, until the next start and beyond; the path may have wildcards."""
    return (
        Remedy("now", f"echo {value} | sudo tee {path}"),
        Remedy("for good", f"echo 'w {path} - - - - {value}' | sudo tee -a {TMPFILES_FILE}"),
    )


def since(uptime_s: float | None) -> str:
    """` in the 3.2 days since the machine was started`, behind something that was counted; empty where not known."""
    if uptime_s is None:
        return ""
    days = uptime_s / 86400
    return f" in the {f'{days:.0f} days' if days >= 3 else format_seconds(uptime_s)} since the machine was started"
