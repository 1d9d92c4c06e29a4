"""All access of the probe to the outside goes through a `Host`.

`LocalHost` reads the machine it runs on; tests replay recorded machines through the same protocol. Missing files,
unreadable files and missing commands are ordinary results.
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
        """Return matching paths, numbers inside names in numeric order."""

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points, as written."""

    def real(self, path: str) -> str:
        """Return `path` with every symbolic link followed."""

    def space(self, path: str) -> tuple[int, int] | None:
        """Return (total, free for us) bytes of the filesystem that holds `path`."""

    def run(self, *command: str) -> CommandResult | None:
        """Run a command; None when it is not installed or did not end in time."""

    def nvml(self) -> nvml.NvmlReading:
        """Return what NVIDIA's management library says."""


class LocalHost:
    """The machine this process runs on."""

    def text(self, path: str) -> str | None:
        """Return a file's text; odd bytes in firmware strings are replaced."""
        data = self.data(path)
        return None if data is None else data.decode(errors="replace")

    def data(self, path: str) -> bytes | None:
        """Return a file's bytes; sysfs answers some reads with an error of its own."""
        try:
            return Path(path).read_bytes()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Tell whether something is there."""
        return os.path.lexists(path)

    def glob(self, pattern: str) -> list[str]:
        """Return matching paths in natural order."""
        return sorted(glob.glob(pattern), key=natural)  # noqa: PTH207  sysfs names are strings, not paths to build on

    def link(self, path: str) -> str | None:
        """Return where a link points."""
        try:
            return os.readlink(path)  # noqa: PTH115  pid:[4026531836] is no path
        except OSError:
            return None

    def real(self, path: str) -> str:
        """Return the path behind every link."""
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
        import pynvml  # noqa: PLC0415  a large module that most commands never need

        return nvml.read(pynvml)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts cpu10 after cpu9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def number(text: str | None) -> int | None:
    """Read one integer file of sysfs, decimal or 0x; None for anything else."""
    try:
        return int((text or "").strip(), 0)
    except ValueError:
        return None
