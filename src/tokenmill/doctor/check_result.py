"""The result of a check: severity, observation, reason, and commands to run.

A check is a pure function from `Facts` to a `CheckResult`, or None if it does not apply to the machine. A fact that
cannot be read makes the result `unknown`, never `fine`.
"""

from dataclasses import dataclass
from typing import Literal

from tokenmill.units import format_seconds

Severity = Literal["problem", "advice", "fine", "unknown"]
SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "unknown", "fine")
"""Most urgent first. A problem costs much speed or causes failures, advice improves speed; both have remedies."""

When = Literal["now", "for good", "look", "by hand"]

SYSCTL_FILE = "/etc/sysctl.d/90-tokenmill.conf"
TMPFILES_FILE = "/etc/tmpfiles.d/tokenmill.conf"
LIMITS_FILE = "/etc/security/limits.d/tokenmill.conf"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A command or configuration line to copy, or a manual step."""

    when: When
    command: str
    note: str | None = None  # its purpose, or the file it belongs in

    @property
    def root(self) -> bool:
        """Whether the command needs root."""
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
    """The suffix of a count: ` since boot 3 days ago`; empty if unknown."""
    if uptime_s is None:
        return ""
    days = uptime_s / 86400
    return f" since boot {f'{days:.0f} days' if days >= 3 else format_seconds(uptime_s)} ago"
