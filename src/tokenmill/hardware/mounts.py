"""/proc/self/mountinfo, which says what is mounted where; the format is in proc(5)."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str  # major:minor; 0:n for filesystems without a block device, btrfs among them
    root: str  # which folder of the filesystem is mounted; / unless it is a bind mount or subvolume
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...] = ()  # of the filesystem, after the dash


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Read every well-formed line, in mount order."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split(" ")
        tail = right.split(" ")
        if dash and len(fields) >= 6 and len(tail) >= 2:
            mounts.append(
                Mount(
                    device=fields[2],
                    root=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    filesystem=tail[0],
                    source=_unescape(tail[1]),
                    options=tuple(_unescape(" ".join(tail[2:])).split(",")),
                )
            )
    return tuple(mounts)


def mount_of(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """Return the mount that holds `path`: the deepest, and of equals the one mounted last."""
    wanted = PurePosixPath(path)
    found = None
    for mount in mounts:
        inside = wanted.is_relative_to(mount.point)
        if inside and (found is None or len(PurePosixPath(mount.point).parts) >= len(PurePosixPath(found.point).parts)):
            found = mount
    return found


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
