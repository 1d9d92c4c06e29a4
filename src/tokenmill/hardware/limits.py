"""Reads the limits of this process: control groups, CPU affinity, locked memory, and containers.

A limit that is not below the machine's size is None. The lowest limit of a control group (v1 or v2) and its parents
applies.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from tokenmill.hardware.disk import MountPoint
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Limits, Note
from tokenmill.units import format_bytes, parse_ranges

# the inode of the first PID namespace, fixed in include/linux/proc_ns.h; containers have another
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
CGROUPS = "/sys/fs/cgroup"
_GROUP_FILES = ("memory.events", "memory.max", "cpu.max", "cpu.stat")
_NO_LIMIT_V1 = 1 << 60  # v1 writes "unlimited" as the largest number of whole pages

_CONTAINER_MARKS = (
    ("kubernetes", "/var/run/secrets/kubernetes.io"),
    ("podman", "/run/.containerenv"),
    ("docker", "/.dockerenv"),
)
_CONTAINER_GROUPS = (("kubernetes", "kubepods"), ("docker", "docker"), ("podman", "libpod"), ("lxc", "lxc"))


def read_limits(host: Host, mounts: tuple[MountPoint, ...], memory_bytes: int | None) -> tuple[Limits, list[Note]]:
    """Return the limits of this process, and notes on soft limits."""
    groups = parse_cgroup(host.text("/proc/self/cgroup") or "")
    memory = _smallest(_memory_limits(host, groups, mounts, "memory.max", "memory.limit_in_bytes"), memory_bytes)
    high = _smallest(_memory_limits(host, groups, mounts, "memory.high", None), memory or memory_bytes)
    quotas = [_cpu_quota(host, folder) for folder in _folders("cpu", groups, mounts)]
    online = parse_ranges(host.text("/sys/devices/system/cpu/online") or "")
    status = host.text("/proc/self/status") or ""
    # the kernel has already applied the cpusets of all parents
    allowed = parse_ranges(_field(status, "Cpus_allowed_list") or "")
    cpuset = allowed if allowed and len(allowed) < len(online) else None
    locked = _field(host.text("/proc/self/limits") or "", "Max locked memory", separator=r"\s+")
    notes = []
    if not groups or locked is None:
        notes.append(
            Note(
                "limits",
                "/proc/self shows no control groups or ulimits, so there may be limits that are not listed",
            )
        )
    if high is not None:
        notes.append(
            Note(
                "limits.cgroup_memory_bytes",
                f"memory.high is {format_bytes(high)}: above it the kernel throttles this process",
            )
        )
    notes += _node_notes(host, parse_ranges(_field(status, "Mems_allowed_list") or ""))
    return Limits(
        memory, min(filter(None, quotas), default=None), cpuset, int(locked) if locked and locked.isdigit() else None
    ), notes


def parse_cgroup(text: str) -> tuple[tuple[frozenset[str], str], ...]:
    """Parse /proc/self/cgroup into (controllers, path) per hierarchy; v2 lists no controllers."""
    groups = []
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups.append((frozenset(filter(None, parts[1].split(","))), parts[2]))
    return tuple(groups)


def cgroup_folder(host: Host, pid: int | Literal["self"] = "self") -> str | None:
    """Return the folder of a process's control group (version 2); None if it is not visible."""
    for controllers, path in parse_cgroup(host.text(f"/proc/{pid}/cgroup") or ""):
        folder = f"{CGROUPS}{path}".rstrip("/")
        if not controllers and any(host.exists(f"{folder}/{name}") for name in _GROUP_FILES):
            return folder
    return None


def read_container(host: Host) -> tuple[str | None, list[Note]]:
    """Return the kind of container that this process runs in, or None, and notes."""
    marks = [name for name, path in _CONTAINER_MARKS if host.exists(path)]
    if "KUBERNETES_SERVICE_HOST=" in (host.text("/proc/self/environ") or ""):
        marks.insert(0, "kubernetes")
    named = re.search(r"(?:^|\0)container=([\w-]+)", host.text("/proc/1/environ") or "")
    declared = named[1] if named else (host.text("/run/systemd/container") or "").strip()
    groups = host.text("/proc/1/cgroup") or ""
    marks += [declared] if declared else []
    marks += [name for name, word in _CONTAINER_GROUPS if re.search(rf"[/:-]{word}", groups)]
    if marks and host.link("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:
        why = "a machine made from a container image, or a container started with --pid=host"
        return None, [Note("container", f"signs of {marks[0]}, but this is the first PID namespace: {why}")]
    return (marks[0] if marks else None), []


def _folders(
    controller: str, groups: Iterable[tuple[frozenset[str], str]], mounts: tuple[MountPoint, ...]
) -> list[str]:
    """Return the folders of this process's control group and its parents, for each mount."""
    folders = []
    for controllers, path in groups:
        if controllers and controller not in controllers:
            continue
        for mount in mounts:
            matches = controller in mount.options if controllers else True
            if mount.filesystem == ("cgroup" if controllers else "cgroup2") and matches:
                folders += _ancestors(path, mount)
    return folders


def _ancestors(path: str, mount: MountPoint) -> list[str]:
    inside = PurePosixPath(path)
    # in a container the path may be that of the host or lead out of the namespace; then only the mount applies
    relative = inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else PurePosixPath()
    if ".." in relative.parts:
        relative = PurePosixPath()
    point = PurePosixPath(mount.point)
    return [str(point / relative), *(str(point / above) for above in relative.parents)]


def _memory_limits(
    host: Host,
    groups: Iterable[tuple[frozenset[str], str]],
    mounts: tuple[MountPoint, ...],
    name: str,
    name_v1: str | None,
) -> list[int]:
    limits = []
    for folder in _folders("memory", groups, mounts):
        for file in filter(None, (name, name_v1)):
            text = (host.text(f"{folder}/{file}") or "").strip()
            if text.isdigit() and int(text) < _NO_LIMIT_V1:
                limits.append(int(text))
    return limits


def _smallest(limits: list[int], machine_bytes: int | None) -> int | None:
    limit = min(limits, default=None)
    return None if limit is None or (machine_bytes is not None and limit >= machine_bytes) else limit


def _cpu_quota(host: Host, folder: str) -> float | None:
    text = host.text(f"{folder}/cpu.max")
    if text is None:
        text = f"{host.text(f'{folder}/cpu.cfs_quota_us') or ''} {host.text(f'{folder}/cpu.cfs_period_us') or ''}"
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None  # "max 100000" in v2, "-1 100000" in v1
    return int(parts[0]) / int(parts[1])


def _node_notes(host: Host, allowed: tuple[int, ...]) -> list[Note]:
    nodes = parse_ranges(host.text("/sys/devices/system/node/has_memory") or "")
    if not allowed or len(allowed) >= len(nodes):
        return []
    return [
        Note(
            "limits",
            f"memory comes from NUMA nodes {', '.join(map(str, allowed))} only, of {len(nodes)} "
            "with memory (limited by a cpuset or numactl)",
        )
    ]


def _field(text: str, name: str, separator: str = r":\s*") -> str | None:
    match = re.search(rf"^{re.escape(name)}{separator}(\S+)", text, re.MULTILINE)
    return match[1] if match else None
