"""The result of a check: severity, observation, reason, and commands to run.

A check is a pure function from `Facts` to a `CheckResult`, or to None if it does not apply to the machine. Anything
that cannot be read is `unknown` with a way to find out; it never counts as fine.
"""

from dataclasses import dataclass
from typing import Literal

from tokenmill.units import format_seconds

Severity = Literal["problem", "advice", "fine", "unknown"]
SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "unknown", "fine")
"""Most urgent first. A problem costs much speed or will fail; advice is an improvement; both have commands."""

When = Literal["now", "for good", "look", "by hand"]

SYSCTL_FILE = "/etc/sysctl.d/90-tokenmill.conf"
TMPFILES_FILE = "/etc/tmpfiles.d/tokenmill.conf"
LIMITS_FILE = "/etc/security/limits.d/tokenmill.conf"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One command or line of a file to copy, or a manual step."""

    when: When
    command: str
    note: str | None = None  # where to put it, or its purpose

    @property
    def root(self) -> bool:
        """Whether it needs root."""
        return self.command.startswith("sudo ") or " sudo " in self.command


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str  # stable name: swap, memlock, gpu-link
    severity: Severity
    seen: str  # observation, with numbers
    why: str | None = None  # one sentence, with the size of the effect if known
    source: str | None = None  # source of `why`
    remedies: tuple[Remedy, ...] = ()


def sysctl(name: str, value: int) -> tuple[Remedy, ...]:
    """Set a kernel parameter now and permanently."""
    return (
        Remedy("now", f"sudo sysctl -w {name}={value}"),
        Remedy("for good", f"echo '{name} = {value}' | sudo tee -a {SYSCTL_FILE}"),
    )


def sysfs(path: str, value: str) -> tuple[Remedy, ...]:
    """Write a kernel file now and at every boot; the path may have wildcards."""
    return (
        Remedy("now", f"echo {value} | sudo tee {path}"),
        Remedy("for good", f"echo 'w {path} - - - - {value}' | sudo tee -a {TMPFILES_FILE}"),
    )


def since(uptime_s: float | None) -> str:
    """The suffix of a count: ` in the 3.2 days since the machine was started`; empty if unknown."""
    if uptime_s is None:
        return ""
    days = uptime_s / 86400
    return f" in the {f'{days:.0f} days' if days >= 3 else format_seconds(uptime_s)} since the machine was started"
