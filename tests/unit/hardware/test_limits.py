from collections.abc import Callable

import pytest

from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.hardware.host import Host
from tokenmill.hardware.limits import parse_cgroup, read_container, read_limits
from tokenmill.hardware.machine import Limits
from tokenmill.units import GIB

Made = Callable[..., Host]

V2 = "31 22 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """33 32 0:29 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
34 32 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
"""
PROCESS = "-- /proc/self/limits --\nMax locked memory         65536                65536                bytes\n"


def limits(made: Made, capture: str, mounts: str, machine_bytes: int | None = 64 * GIB) -> Limits:
    return read_limits(made(PROCESS + capture), parse_mountinfo(mounts), machine_bytes)[0]


def test_version_2_smallest_on_the_way_up(made: Made) -> None:
    capture = f"""-- /proc/self/cgroup --
0::/a/b/c
-- /sys/fs/cgroup/a/memory.max --
{8 * GIB}
-- /sys/fs/cgroup/a/b/memory.max --
{12 * GIB}
-- /sys/fs/cgroup/a/b/c/memory.max --
max
-- /sys/fs/cgroup/a/b/cpu.max --
250000 100000
-- /sys/fs/cgroup/a/b/c/cpu.max --
max 100000
"""
    found = limits(made, capture, V2.format(root="/"))
    assert (found.cgroup_memory_bytes, found.cgroup_cpus, found.memlock_bytes) == (8 * GIB, 2.5, 65536)


def test_version_2_inside_a_container(made: Made) -> None:
    capture = f"-- /proc/self/cgroup --\n0::/\n-- /sys/fs/cgroup/memory.max --\n{4 * GIB}\n"
    assert limits(made, capture, V2.format(root="/")).cgroup_memory_bytes == 4 * GIB


def test_version_1_in_a_container_that_sees_the_hosts_paths(made: Made) -> None:
    capture = f"""-- /proc/self/cgroup --
4:memory:/docker/abc
3:cpu,cpuacct:/docker/abc
-- /sys/fs/cgroup/memory/memory.limit_in_bytes --
{2 * GIB}
-- /sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us --
150000
-- /sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us --
100000
"""
    found = limits(made, capture, V1.format(root="/docker/abc"))
    assert (found.cgroup_memory_bytes, found.cgroup_cpus) == (2 * GIB, 1.5)


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "max", "", str(64 * GIB), str(65 * GIB)])
def test_a_limit_not_below_the_machines_memory_is_none(unlimited: str, made: Made) -> None:
    capture = f"""-- /proc/self/cgroup --
4:memory:/
3:cpu,cpuacct:/
-- /sys/fs/cgroup/memory/memory.limit_in_bytes --
{unlimited}
-- /sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us --
-1
-- /sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us --
100000
"""
    found = limits(made, capture, V1.format(root="/"))
    assert (found.cgroup_memory_bytes, found.cgroup_cpus) == (None, None)


def test_paths_outside_the_namespace_fall_back_to_the_mount(made: Made) -> None:
    capture = f"-- /proc/self/cgroup --\n0::/../other\n-- /sys/fs/cgroup/memory.max --\n{GIB}\n"
    assert limits(made, capture, V2.format(root="/")).cgroup_memory_bytes == GIB


def test_affinity_and_nodes(made: Made) -> None:
    capture = """-- /proc/self/cgroup --
0::/
-- /sys/devices/system/cpu/online --
0-15
-- /sys/devices/system/node/has_memory --
0-1
-- /proc/self/status --
Cpus_allowed_list:\t0-3,8
Mems_allowed_list:\t1
"""
    found, (note,) = read_limits(made(PROCESS + capture), (), None)
    assert found.cpuset == (0, 1, 2, 3, 8)
    assert "NUMA nodes 1 only, of 2" in note.text


def test_unlimited_locked_memory(made: Made) -> None:
    capture = "-- /proc/self/limits --\nMax locked memory         unlimited            unlimited            bytes\n"
    assert read_limits(made(capture), (), None)[0].memlock_bytes is None


@pytest.mark.parametrize("text", ["", "garbage\n", "0:no second colon\n"])
def test_odd_control_group_files(text: str) -> None:
    assert parse_cgroup(text) == ()


@pytest.mark.parametrize(
    ("capture", "container"),
    [
        ("", None),
        ("-- /.dockerenv --\n", "docker"),
        ("-- /run/.containerenv --\n", "podman"),
        ("-- /.dockerenv --\n-- /proc/self/environ --\nA=1\0KUBERNETES_SERVICE_HOST=10.0.0.1\0\n", "kubernetes"),
        ("-- /var/run/secrets/kubernetes.io/x --\n", "kubernetes"),
        ("-- /proc/1/environ --\nHOME=/\0container=lxc\0\n", "lxc"),
        ("-- /run/systemd/container --\nsystemd-nspawn\n", "systemd-nspawn"),
        ("-- /proc/1/cgroup --\n0::/docker/abc\n", "docker"),
        ("-- /proc/1/cgroup --\n11:memory:/kubepods/burstable/pod1\n", "kubernetes"),
        ("-- /proc/1/cgroup --\n0::/machine.slice/libpod-1.scope\n", "podman"),
        ("-- /proc/1/cgroup --\n0::/init.scope\n", None),
        ("-- /.dockerenv --\n-- link /proc/self/ns/pid --\npid:[4026532201]\n", "docker"),
    ],
)
def test_containers(capture: str, container: str | None, made: Made) -> None:
    assert read_container(made(capture)) == (container, [])


def test_container_signs_in_the_first_pid_namespace_do_not_count(made: Made) -> None:
    container, (note,) = read_container(made("-- /.dockerenv --\n-- link /proc/self/ns/pid --\npid:[4026531836]\n"))
    assert container is None
    assert "--pid=host" in note.text
