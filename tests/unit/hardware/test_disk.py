from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.hardware.disk import MountPoint, mount_of, parse_mountinfo, read_disk
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Disk, Note

Captured = Callable[[str], Host]


def disk_of(host: Host, path: str, *, virtual: bool = False) -> tuple[Disk, list[Note]]:
    mounts = parse_mountinfo(host.text("/proc/self/mountinfo") or "")
    return read_disk(host, Path(path), mounts, virtual=virtual)


@pytest.mark.parametrize(
    ("machine", "path", "device", "filesystem", "kind"),
    [
        ("epyc-dual", "/data/models/new", "/dev/md127", "xfs", "nvme"),
        ("epyc-dual", "/srv", "/dev/dm-0", "ext4", "nvme"),
        ("epyc-dual", "/archive/x", "filer:/archive", "nfs4", "network"),
        ("desktop", "/home/me", "/dev/dm-0", "btrfs", "nvme"),
        ("desktop", "/tmp/x", None, "tmpfs", "memory"),
        ("desktop", "/mnt/cold store/models", "/dev/sdb1", "ext4", "hdd"),
        ("desktop", "/mnt/nas", "me@nas:/pool", "fuse.sshfs", "network"),
        ("eight-3090", "/home/x", "/dev/nvme0n1p3", "btrfs", "nvme"),
        ("optane-memory-mode", "/", "/dev/sda2", "ext4", "ssd"),
        ("pmem-app-direct", "/mnt/pmem0", "/dev/pmem0", "xfs", None),
        ("this-vm", "/", "/dev/vda", "ext4", None),
    ],
)
def test_from_path_to_disk(
    machine: str, path: str, device: str | None, filesystem: str, kind: str | None, captured: Captured
) -> None:
    disk, notes = disk_of(captured(machine), path)
    assert (disk.path, disk.device, disk.filesystem, disk.kind) == (path, device, filesystem, kind)
    if kind is None:
        assert "disk.kind" in [note.about for note in notes]


def test_layers_are_named(captured: Captured) -> None:
    _, notes = disk_of(captured("epyc-dual"), "/data")
    (text,) = [note.text for note in notes if note.about == "disk.device"]
    for device in ("/dev/md127", "nvme1n1", "nvme2n1"):
        assert device in text
    _, notes = disk_of(captured("optane-memory-mode"), "/")
    assert "disk.device" not in [note.about for note in notes]  # a partition does not count as a layer


def test_free_space_is_that_of_the_nearest_existing_folder(captured: Captured) -> None:
    disk, _ = disk_of(captured("epyc-dual"), "/data/not/yet/there")
    assert (disk.total_bytes, disk.free_bytes) == (15358520623104, 9876543210987)


def test_the_kind_of_a_virtual_disk_is_unknown(captured: Captured) -> None:
    disk, notes = disk_of(captured("optane-memory-mode"), "/", virtual=True)
    assert disk.kind is None
    assert "virtual disk" in " ".join(note.text for note in notes)


@pytest.mark.parametrize(
    ("filesystem", "source", "words"),
    [
        ("overlay", "overlay", "overlay"),
        ("zfs", "tank/models", "zpool status"),
        ("fuse.mergerfs", "a:b", "fuse.mergerfs"),
    ],
)
def test_filesystems_without_a_disk(filesystem: str, source: str, words: str, made: Callable[..., Host]) -> None:
    mount = MountPoint("0:50", "/", "/", filesystem, source)
    disk, notes = read_disk(made(), Path("/models"), (mount,), virtual=False)
    assert (disk.kind, disk.device, disk.filesystem) == (None, None, filesystem)
    assert words in notes[0].text


def test_disks_of_several_kinds_count_as_the_slowest(made: Callable[..., Host]) -> None:
    host = made("""-- /sys/dev/block/9:0/uevent --
DEVNAME=md0
-- /sys/class/block/md0/slaves/sda/uevent --
-- /sys/class/block/md0/slaves/nvme0n1/uevent --
-- /sys/block/sda/queue/rotational --
1
-- /sys/block/nvme0n1/queue/rotational --
0
""")
    disk, notes = read_disk(host, Path("/"), (MountPoint("9:0", "/", "/", "ext4", "/dev/md0"),), virtual=False)
    assert disk.kind == "hdd"
    assert "several kinds" in " ".join(note.text for note in notes)


def test_unknown_mount(made: Callable[..., Host]) -> None:
    disk, (note,) = read_disk(made("-- space / --\n10 5\n"), Path("/models"), (), virtual=False)
    assert disk == Disk("/models", total_bytes=10, free_bytes=5)
    assert "findmnt" in note.text


def test_deepest_mount_and_last_of_equals() -> None:
    first = MountPoint("1:1", "/", "/data", "ext4", "/dev/a")
    second = MountPoint("1:2", "/", "/data", "xfs", "/dev/b")
    root = MountPoint("1:0", "/", "/", "ext4", "/dev/r")
    assert mount_of("/data/models", (first, root, second)) == second
    assert mount_of("/database", (first, root, second)) == root
    assert mount_of("/data", ()) is None


def test_escapes_and_bind_mounts_in_mountinfo() -> None:
    (mount,) = parse_mountinfo(
        "60 28 8:17 /sub\\040folder /mnt/cold\\040store rw,relatime shared:31 master:2 - ext4 /dev/sdb1 "
        "rw,errors=continue\n"
        "not a mount line\n"
    )
    assert (mount.root, mount.point, mount.options) == ("/sub folder", "/mnt/cold store", ("rw", "errors=continue"))
