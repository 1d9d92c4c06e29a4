"""Reads the disk that holds a path: file system, device, kind and free space, but not its read rate.

Follows the mount to its block device, then device-mapper, LUKS and RAID to the disks. The kind of a virtual disk is
unknown, because the hardware below it is not visible.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import Disk, DiskKind, Note


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of mountinfo."""

    device: str  # major:minor; 0:n for file systems without a block device, such as btrfs
    root: str  # mounted folder of the filesystem; / unless it is a bind mount or subvolume
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...] = ()  # of the filesystem, after the dash


def parse_mountinfo(text: str) -> tuple[MountPoint, ...]:
    """Parse /proc/self/mountinfo in mount order, skipping malformed lines."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split(" ")
        tail = right.split(" ")
        if dash and len(fields) >= 6 and len(tail) >= 2:
            mounts.append(
                MountPoint(
                    device=fields[2],
                    root=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    filesystem=tail[0],
                    source=_unescape(tail[1]),
                    options=tuple(_unescape(" ".join(tail[2:])).split(",")),
                )
            )
    return tuple(mounts)


def mount_of(path: str, mounts: tuple[MountPoint, ...]) -> MountPoint | None:
    """Return the mount that holds `path`: the deepest, or the last one mounted at the same place."""
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


_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "glusterfs",
    "afs",
    "beegfs",
    "gpfs",
    "9p",
    "ocfs2",
    "virtiofs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.juicefs",
    "fuse.goofys",
    "fuse.blobfuse",
    "fuse.davfs2",
    "davfs",
}
MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
_SLOWEST_FIRST: tuple[DiskKind, ...] = ("hdd", "ssd", "nvme")


def read_disk(host: Host, path: Path, mounts: tuple[MountPoint, ...], *, virtual: bool) -> tuple[Disk, list[Note]]:
    """Return the disk that holds `path`, which need not exist yet, and notes."""
    place = host.real(str(nearest_existing(host, path)))
    mount = mount_of(place, mounts)
    space = host.space(place)
    if mount is None:
        return Disk(str(path), total_bytes=space[0] if space else None, free_bytes=space[1] if space else None), [
            Note("disk.device", "the mount of this path is unknown: see findmnt --target")
        ]
    device, kind, notes = _kind(host, mount, virtual=virtual)
    disk = Disk(
        path=str(path),
        device=device,
        filesystem=mount.filesystem,
        kind=kind,
        total_bytes=space[0] if space else None,
        free_bytes=space[1] if space else None,
    )
    rate = Note("disk.nominal_gb_s", "not reported by any tool: measure it with tokenmill probe --measure")
    return disk, [*notes, rate]


def nearest_existing(host: Host, path: Path) -> PurePosixPath:
    """Return `path` or its closest existing parent."""
    wanted = PurePosixPath(path)
    return next((place for place in (wanted, *wanted.parents) if host.exists(str(place))), PurePosixPath("/"))


def _kind(host: Host, mount: MountPoint, *, virtual: bool) -> tuple[str | None, DiskKind | None, list[Note]]:
    if mount.filesystem in _NETWORK:
        return mount.source, "network", []
    if mount.filesystem in MEMORY_FILE_SYSTEMS:
        note = f"{mount.point} is {mount.filesystem}: its files take up memory"
        return None, "memory", [Note("disk.kind", note)]
    name = block_name(host, mount)
    if name is None:
        text = f"{mount.filesystem} at {mount.point} does not name a disk; on ZFS see zpool status"
        return None, None, [Note("disk.kind", text)]
    device = f"/dev/{name}"
    disks = underlying(host, name)
    kinds = {disk: disk_kind(host, disk, virtual=virtual) for disk in disks}
    notes = []
    if len(disks) > 1 or not name.startswith(disks[0]):  # more than a disk and its partition
        notes.append(Note("disk.device", f"{device} is on {', '.join(disks)}"))
    known = {kind for kind, _ in kinds.values()}
    reasons = sorted({reason for _, reason in kinds.values() if reason})
    if None in known or len(known) != 1:
        notes += [Note("disk.kind", reason) for reason in reasons]
    if None in known:
        return device, None, notes
    if len(known) > 1:
        notes.append(Note("disk.kind", "there are several kinds of disks; this is the slowest"))
    return device, next(kind for kind in (*_SLOWEST_FIRST, "memory") if kind in known), notes


def block_name(host: Host, mount: MountPoint) -> str | None:
    """Return the kernel's name of the mounted block device, found by number or (btrfs) by the mount's source."""
    uevent = host.text(f"/sys/dev/block/{mount.device}/uevent") or ""
    named = re.search(r"^DEVNAME=(.+)$", uevent, re.MULTILINE)
    if named:
        return named[1]
    if not mount.source.startswith("/dev/"):
        return None
    name = mount.source.removeprefix("/dev/")
    if name.startswith("mapper/"):
        wanted = name.removeprefix("mapper/")
        for path in host.glob("/sys/block/dm-*/dm/name"):
            if (host.text(path) or "").strip() == wanted:
                return path.split("/")[3]
    return name if host.exists(f"/sys/class/block/{name}") else None


def underlying(host: Host, name: str) -> list[str]:
    """Return the disks below a block device, through any number of layers."""
    below = [path.rpartition("/")[2] for path in host.glob(f"/sys/class/block/{name}/slaves/*")]
    if below:
        return sorted({disk for device in below for disk in underlying(host, device)})
    parents = host.glob(f"/sys/block/*/{name}")  # a partition is a folder of its disk
    return underlying(host, parents[0].split("/")[3]) if parents else [name]


def disk_kind(host: Host, disk: str, *, virtual: bool) -> tuple[DiskKind | None, str | None]:
    """Return the kind of a disk, or None and the reason why it is unknown."""
    if disk.startswith("nvme"):
        return "nvme", None
    if disk.startswith(("zram", "ram")):
        return "memory", None
    if disk.startswith("pmem"):
        return None, f"{disk} is persistent memory, not a disk"
    if disk.startswith(("vd", "xvd", "loop", "nbd", "rbd", "drbd")) or virtual:
        return None, f"{disk} is a virtual disk; the hardware below it is not visible"
    rotational = number(host.text(f"/sys/block/{disk}/queue/rotational"))
    if rotational is None:
        return None, f"the kernel does not report the kind of {disk}: see lsblk --output-all"
    return ("hdd" if rotational else "ssd"), None
