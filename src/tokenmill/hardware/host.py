"""The probe's access to files and commands.

`LocalHost` reads this machine; tests implement the `Host` protocol with recorded machines. Missing or unreadable files
and missing commands are ordinary results, not errors.
"""

import glob
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenmill.hardware.gpu import nvml

_COMMAND_LIMIT_S = 10.0
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # dmidecode and ipmctl live here, often outside a user's PATH


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    code: int
    out: str
    err: str = ""


class Host(Protocol):
    """The probe's view of a machine. Paths are absolute; None means missing or not permitted."""

    def text(self, path: str) -> str | None:
        """Return a file's text."""

    def data(self, path: str) -> bytes | None:
        """Return a file's bytes."""

    def exists(self, path: str) -> bool:
        """Whether a path exists, readable or not."""

    def glob(self, pattern: str) -> list[str]:
        """Return matching paths, sorted with numbers in numeric order."""

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link, as written."""

    def real(self, path: str) -> str:
        """Return `path` with every symbolic link followed."""

    def space(self, path: str) -> tuple[int, int] | None:
        """Return (total, free for us) bytes of the filesystem that holds `path`."""

    def run(self, *command: str) -> CommandResult | None:
        """Run a command; None if it is not installed or does not end within ten seconds."""

    def nvml(self) -> nvml.NvmlReading:
        """Read NVIDIA's management library."""


class LocalHost:
    """The machine this process runs on."""

    def text(self, path: str) -> str | None:
        """Return a file's text; invalid bytes are replaced."""
        data = self.data(path)
        return None if data is None else data.decode(errors="replace")

    def data(self, path: str) -> bytes | None:
        """Return a file's bytes; None for any error."""
        try:
            return Path(path).read_bytes()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether a path exists, even as a broken link."""
        return os.path.lexists(path)

    def glob(self, pattern: str) -> list[str]:
        """Return matching paths in natural order."""
        return sorted(glob.glob(pattern), key=natural)  # noqa: PTH207  returns strings

    def link(self, path: str) -> str | None:
        """Return the target of a link."""
        try:
            return os.readlink(path)  # noqa: PTH115  pid:[4026531836] is not a path
        except OSError:
            return None

    def real(self, path: str) -> str:
        """Return the path with all links resolved."""
        return os.path.realpath(path)

    def space(self, path: str) -> tuple[int, int] | None:
        """Return total and free bytes."""
        try:
            stat = os.statvfs(path)
        except OSError:
            return None
        return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize

    def run(self, *command: str) -> CommandResult | None:
        """Run a command in the C locale."""
        env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', os.defpath)}:{_ADMIN_PATH}"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                env=env,
                stdin=subprocess.DEVNULL,
                timeout=_COMMAND_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def nvml(self) -> nvml.NvmlReading:
        """Read NVML in this process."""
        import pynvml  # noqa: PLC0415  a large module that most commands do not need

        return nvml.read(pynvml)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that orders cpu9 before cpu10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def number(text: str | None) -> int | None:
    """Parse the integer in a sysfs file, decimal or 0x; None for anything else."""
    try:
        return int((text or "").strip(), 0)
    except ValueError:
        return None
