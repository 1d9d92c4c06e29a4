"""The severity of every check for the facts that it depends on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.doctor_machines import MACHINE, facts, model, planned
from tokenmill.doctor import engines, gpus, limits, memory, numa, processor, storage
from tokenmill.doctor.check_result import CheckResult, Severity, sysctl, sysfs
from tokenmill.doctor.examine import CHECKS
from tokenmill.doctor.facts import (
    CgroupFacts,
    Clocks,
    CounterSample,
    DoctorEngine,
    Facts,
    GpuState,
    Kernel,
    MemoryHolder,
    Pool,
)
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.process.registry import Record
from tokenmill.hardware.machine import (
    Cpu,
    Dimm,
    Disk,
    Dram,
    Gpu,
    HugePages,
    Limits,
    Machine,
    NumaNode,
    PcieLink,
    Pmem,
    Swap,
)
from tokenmill.launch.binding import host_weights_bytes
from tokenmill.native.builds.gpu_support import UnusedGpus
from tokenmill.planner.plan import Shortfall
from tokenmill.units import GIB, MIB

Check = Callable[[Facts], CheckResult | None]
TWO_NODES = (NumaNode(0, (0, 1), 100 * GIB, 50 * GIB), NumaNode(1, (2, 3), 100 * GIB, 50 * GIB))
NUMA = replace(MACHINE, numa=TWO_NODES)
CARD = Gpu(0, "card", "nvidia", 24 * GIB, 23 * GIB, pcie=PcieLink(4, 16, 4, 16))


def said(check: Check, given: Facts) -> CheckResult:
    finding = check(given)
    assert finding is not None
    return finding


def swapping(coming: int, going: int, used: int | None = GIB) -> Facts:
    machine = replace(MACHINE, swap=Swap(128 * GIB, used))
    return facts(machine, before=CounterSample(0.0, 0, 0), after=CounterSample(2.0, coming, going))


def modules(rated: int | None, runs: int | None, machine: Machine = MACHINE) -> Machine:
    return replace(
        machine, dram=Dram(64 * GIB, dimms=(Dimm("A", 32 * GIB, "DDR5", rated, runs),), channels=2, mts=runs)
    )


def limited(**given: object) -> Machine:
    return replace(MACHINE, limits=Limits(**given))  # type: ignore[arg-type]


def card(**changes: object) -> Machine:
    return replace(MACHINE, gpus=(replace(CARD, **changes),))  # type: ignore[arg-type]


def huge(setting: str | None) -> Machine:
    return replace(MACHINE, huge_pages=HugePages(transparent=setting))


def on(**changes: object) -> Machine:
    return replace(MACHINE, disk=Disk("/srv/models", **changes))  # type: ignore[arg-type]


PERFORMANCE = Clocks({"performance": 32}, {"acpi-cpufreq": 32}, {}, boost=True)

CASES: list[tuple[Check, Facts, Severity]] = [
    (memory.swap, facts(), "unknown"),
    (memory.swap, swapping(0, 0), "fine"),
    (memory.swap, swapping(0, 0, used=0), "fine"),
    (memory.swap, swapping(MIB, MIB), "fine"),  # half a MiB a second
    (memory.swap, swapping(3 * MIB, 0), "problem"),
    (memory.swap, swapping(0, 3 * MIB), "problem"),
    (memory.memlock, facts(), "unknown"),
    (memory.memlock, facts(memlock_known=True), "fine"),
    (memory.memlock, facts(memlock_known=True, memlock_bytes=8 * MIB), "advice"),
    (memory.memlock, facts(memlock_known=True, memlock_bytes=8 * MIB, model=model()), "advice"),
    (memory.memlock, facts(memlock_known=True, memlock_bytes=8 * MIB, model=model(planned(mlock=True))), "problem"),
    (memory.memlock, facts(memlock_known=True, memlock_bytes=900 * GIB, model=model(planned(mlock=True))), "fine"),
    (memory.memory_speed, facts(), "unknown"),
    (memory.memory_speed, facts(modules(6000, None)), "unknown"),
    (memory.memory_speed, facts(modules(6000, 6000)), "fine"),
    (memory.memory_speed, facts(modules(6000, 4800)), "advice"),
    (memory.memory_channels, facts(), "unknown"),
    (memory.memory_channels, facts(modules(6000, 6000), board_channels=2), "fine"),
    (memory.memory_channels, facts(modules(6000, 6000), board_channels=12), "problem"),
    (memory.huge_pages, facts(huge(None)), "unknown"),
    (memory.huge_pages, facts(huge("always")), "fine"),
    (memory.huge_pages, facts(huge("madvise")), "advice"),
    (memory.huge_pages, facts(huge("never"), model=model(planned(mmap=True))), "fine"),
    (memory.huge_pages, facts(huge("never"), model=model(planned(mmap=False))), "advice"),
    (memory.reserved_pages, facts(pools=(Pool(GIB, 16, None),)), "unknown"),
    (memory.reserved_pages, facts(pools=(Pool(GIB, 16, 0),)), "fine"),
    (memory.reserved_pages, facts(pools=(Pool(GIB, 16, 8),)), "advice"),
    (memory.reserved_pages, facts(pools=(Pool(GIB, 671, 671),)), "problem"),
    (memory.overcommit, facts(), "unknown"),
    (memory.overcommit, facts(kernel=Kernel(overcommit_memory=0)), "fine"),
    (memory.overcommit, facts(kernel=Kernel(overcommit_memory=2)), "advice"),
    (
        memory.overcommit,
        facts(
            kernel=Kernel(overcommit_memory=2, commit_limit_bytes=20 * GIB, committed_bytes=GIB),
            model=model(planned(mmap=False)),
        ),
        "problem",
    ),
    (memory.oom_kills, facts(), "unknown"),
    (memory.oom_kills, facts(kernel=Kernel(oom_kills=0)), "fine"),
    (memory.oom_kills, facts(kernel=Kernel(oom_kills=1)), "advice"),
    (memory.oom_kills, facts(groups=(CgroupFacts("/a", oom_kills=1),)), "advice"),
    (limits.memory_limit, facts(groups_seen=False), "unknown"),
    (limits.memory_limit, facts(), "fine"),
    (limits.memory_limit, facts(limited(cgroup_memory_bytes=64 * GIB)), "advice"),
    (limits.memory_limit, facts(limited(cgroup_memory_bytes=700 * GIB), model=model()), "fine"),
    (limits.memory_limit, facts(limited(cgroup_memory_bytes=16 * GIB), model=model()), "problem"),
    (limits.memory_limit, facts(groups=(CgroupFacts("/a", high_bytes=16 * GIB),), model=model()), "problem"),
    (
        limits.memory_limit,
        facts(groups=(CgroupFacts("/a", high_bytes=2000 * GIB),)),
        "fine",
    ),  # more than the machine has
    (limits.cpu_limit, facts(groups_seen=False), "unknown"),
    (limits.cpu_limit, facts(), "fine"),
    (limits.cpu_limit, facts(limited(cgroup_cpus=4.0)), "advice"),
    (limits.cpu_limit, facts(limited(cgroup_cpus=8.0), model=model()), "fine"),
    (limits.cpu_limit, facts(limited(cgroup_cpus=4.0), model=model()), "problem"),
    (limits.cpu_limit, facts(limited(cpuset=(0, 1)), model=model()), "problem"),
    (
        limits.cpu_limit,
        facts(
            limited(cgroup_cpus=8.0),
            model=model(),
            before=CounterSample(0.0, quota_throttles=0, quota_periods=0),
            after=CounterSample(1.0, quota_throttles=3, quota_periods=10),
        ),
        "problem",
    ),
    (limits.shared_memory, facts(), "unknown"),
    (limits.shared_memory, facts(shm_bytes=16 * GIB), "fine"),
    (limits.shared_memory, facts(shm_bytes=64 * MIB), "advice"),
    (limits.shared_memory, facts(shm_bytes=64 * MIB, engine_kind="vllm"), "problem"),
    (limits.open_files, facts(), "unknown"),
    (limits.open_files, facts(memlock_known=True), "fine"),  # the limits were read, and this one is unlimited
    (limits.open_files, facts(open_files=1024), "fine"),
    (limits.open_files, facts(open_files=256, open_files_hard=4096), "advice"),
    (numa.numa_nodes, facts(replace(MACHINE, numa=())), "unknown"),
    (numa.numa_nodes, facts(), "fine"),
    (numa.numa_nodes, facts(NUMA), "fine"),  # tokenmill binds its engines
    (numa.numa_nodes, facts(NUMA, started_by_us=False), "advice"),
    (numa.numa_uneven, facts(NUMA), "fine"),
    (numa.numa_uneven, facts(replace(NUMA, numa=(replace(TWO_NODES[0], free_bytes=GIB), TWO_NODES[1]))), "advice"),
    (numa.numa_balancing, facts(NUMA), "unknown"),
    (numa.numa_balancing, facts(NUMA, kernel=Kernel(numa_balancing=0)), "fine"),
    (numa.numa_balancing, facts(NUMA, kernel=Kernel(numa_balancing=1)), "advice"),
    (numa.zone_reclaim, facts(NUMA), "unknown"),
    (numa.zone_reclaim, facts(NUMA, kernel=Kernel(zone_reclaim_mode=0)), "fine"),
    (numa.zone_reclaim, facts(NUMA, kernel=Kernel(zone_reclaim_mode=1)), "problem"),
    (processor.governor, facts(), "unknown"),
    (processor.governor, facts(clocks=PERFORMANCE), "fine"),
    (processor.governor, facts(clocks=replace(PERFORMANCE, boost=False)), "advice"),
    (processor.governor, facts(clocks=replace(PERFORMANCE, governors={"performance": 31, "ondemand": 1})), "advice"),
    (processor.governor, facts(clocks=Clocks({"powersave": 8}, {"intel_pstate": 8}, {"performance": 8})), "fine"),
    (processor.governor, facts(clocks=Clocks({"powersave": 8}, {"intel_pstate": 8}, {"balance_power": 8})), "advice"),
    (processor.governor, facts(clocks=Clocks({"powersave": 8}, {"acpi-cpufreq": 8})), "advice"),
    (processor.cpu_throttling, facts(), "unknown"),
    (
        processor.cpu_throttling,
        facts(before=CounterSample(0.0, throttles=0), after=CounterSample(1.0, throttles=0)),
        "fine",
    ),
    (
        processor.cpu_throttling,
        facts(before=CounterSample(0.0, throttles=9), after=CounterSample(1.0, throttles=9)),
        "advice",
    ),
    (
        processor.cpu_throttling,
        facts(before=CounterSample(0.0, throttles=8), after=CounterSample(1.0, throttles=9)),
        "problem",
    ),
    (processor.instruction_set, facts(replace(MACHINE, cpu=Cpu())), "unknown"),
    (processor.instruction_set, facts(), "fine"),
    (processor.instruction_set, facts(replace(MACHINE, cpu=Cpu(isa=("avx2", "fma", "f16c", "avx512f")))), "advice"),
    (processor.instruction_set, facts(replace(MACHINE, cpu=Cpu(isa=("f16c",)))), "problem"),
    (gpus.gpu_link, facts(card(pcie=PcieLink())), "unknown"),
    (gpus.gpu_link, facts(card()), "fine"),
    (gpus.gpu_link, facts(card(pcie=PcieLink(1, 16, 4, 16))), "fine"),  # idle
    (gpus.gpu_link, facts(card(pcie=PcieLink(1, 16, 4, 16)), gpu_states=(GpuState(0, utilization=0.9),)), "problem"),
    (gpus.gpu_link, facts(card(pcie=PcieLink(4, 4, 4, 16))), "problem"),
    (gpus.gpu_link, facts(card(), gpu_states=(GpuState(0, device_generation=5),)), "advice"),
    (gpus.gpu_memory, facts(card(free_bytes=None)), "unknown"),
    (gpus.gpu_memory, facts(card()), "fine"),
    (gpus.gpu_memory, facts(card(free_bytes=10 * GIB)), "advice"),
    (gpus.gpu_memory, facts(card(vram_bytes=96 * GIB, free_bytes=95 * GIB), model=model(planned(1))), "fine"),
    (gpus.gpu_memory, facts(card(vram_bytes=96 * GIB, free_bytes=20 * GIB), model=model(planned(1))), "problem"),
    (gpus.gpu_power, facts(card()), "unknown"),
    (gpus.gpu_power, facts(card(), gpu_states=(GpuState(0, power_limit_w=350, default_power_limit_w=350),)), "fine"),
    (gpus.gpu_power, facts(card(), gpu_states=(GpuState(0, power_limit_w=250, default_power_limit_w=350),)), "advice"),
    (gpus.gpu_persistence, facts(card(), gpu_states=(GpuState(0),)), "unknown"),
    (gpus.gpu_persistence, facts(card(), gpu_states=(GpuState(0, persistent=True),)), "fine"),
    (gpus.gpu_persistence, facts(card(), gpu_states=(GpuState(0, persistent=False),)), "advice"),
    (gpus.gpu_throttling, facts(card()), "unknown"),
    (gpus.gpu_throttling, facts(card(), gpu_states=(GpuState(0, slowed_by=("gpu_idle", "sw_power_cap")),)), "fine"),
    (gpus.gpu_throttling, facts(card(), gpu_states=(GpuState(0, slowed_by=("hw_slowdown",)),)), "problem"),
    (gpus.gpu_throttling, facts(card(), gpu_states=(GpuState(0, slowed_s={"hw_therm_slowdown": 40.0}),)), "advice"),
    (storage.disk_speed, facts(model=model()), "unknown"),
    (storage.disk_speed, facts(model=model(disk_gb_s=3.0)), "fine"),
    (storage.disk_speed, facts(model=model(disk_gb_s=0.08)), "advice"),
    (storage.disk_speed, facts(model=model(disk_gb_s=0.02)), "problem"),
    (storage.file_system, facts(on()), "unknown"),
    (storage.file_system, facts(), "fine"),
    (storage.file_system, facts(on(filesystem="nfs4", kind="network")), "advice"),
    (storage.file_system, facts(on(filesystem="overlay")), "advice"),
    (storage.file_system, facts(on(filesystem="zfs")), "advice"),
    (storage.page_cache, facts(model=model(paths=(Path("/srv/a.gguf"),))), "unknown"),
    (
        storage.page_cache,
        facts(model=model(paths=(Path("/srv/a.gguf"),), cached_bytes=60 * GIB, file_bytes=61 * GIB)),
        "fine",
    ),
    (
        storage.page_cache,
        facts(model=model(paths=(Path("/srv/a.gguf"),), cached_bytes=0, file_bytes=61 * GIB)),
        "advice",
    ),
    (
        storage.page_cache,
        facts(model=model(paths=(Path("/srv/a.gguf"),), cached_bytes=0, file_bytes=GIB, disk_gb_s=3.0)),
        "fine",
    ),
    (engines.plan_fits, facts(model=model()), "fine"),
    (
        engines.plan_fits,
        facts(model=model(replace(planned(), shortfalls=(Shortfall("dram", 9, 1, "load_peak"),)))),
        "problem",
    ),
    (engines.engine_records, facts(), "fine"),
    (gpus.gpu_library, facts(replace(MACHINE, gpus=(CARD,))), "fine"),
    (
        gpus.gpu_library,
        facts(replace(MACHINE, gpus=(CARD,)), unused_gpus=UnusedGpus((CARD,), "a library")),
        "problem",
    ),
]


@pytest.mark.parametrize(("check", "given", "severity"), CASES, ids=[f"{case[0].__name__}-{case[2]}" for case in CASES])
def test_severity(check: Check, given: Facts, severity: Severity) -> None:
    finding = said(check, given)
    assert finding.severity == severity, finding
    assert finding.seen
    if severity in ("problem", "advice"):
        assert finding.why
        assert finding.remedies
    if severity == "fine":
        assert not finding.remedies


def test_every_check_has_a_case_of_every_severity_that_it_knows() -> None:
    seen: dict[str, set[str]] = {}
    for check, _, severity in CASES:
        seen.setdefault(check.__name__, set()).add(severity)
    assert set(seen) == {check.__name__ for check in CHECKS}
    poor = {name for name, severities in seen.items() if "fine" not in severities or len(severities) < 2}
    assert poor == {"engine_records"}  # its other severities have a test of their own


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (memory.memory_speed, facts(replace(MACHINE, virtual="KVM"))),
        (memory.memory_channels, facts(replace(MACHINE, virtual="KVM"))),
        (memory.reserved_pages, facts()),
        (numa.numa_uneven, facts()),
        (numa.numa_balancing, facts(kernel=Kernel(numa_balancing=1))),
        (numa.zone_reclaim, facts(kernel=Kernel(zone_reclaim_mode=1))),
        (processor.cpu_throttling, facts(replace(MACHINE, virtual="KVM"))),
        (processor.instruction_set, facts(own_build=True)),
        (processor.instruction_set, facts(engine_kind="vllm")),
        (gpus.gpu_library, facts()),
        (gpus.gpu_library, facts(replace(MACHINE, gpus=(CARD,)), engine_kind="vllm")),
        (gpus.gpu_link, facts()),
        (gpus.gpu_memory, facts()),
        (gpus.gpu_power, facts(card(vendor="amd"))),
        (storage.disk_speed, facts()),
        (storage.page_cache, facts(model=model(planned(mmap=False), paths=(Path("/a"),)))),
        (engines.plan_fits, facts()),
    ],
)
def test_checks_that_do_not_apply_return_nothing(check: Check, given: Facts) -> None:
    assert check(given) is None


def test_memlock_shows_the_limit_and_the_weights_of_the_plan() -> None:
    plan = planned(mlock=True)
    finding = said(memory.memlock, facts(memlock_known=True, memlock_bytes=8 * MIB, model=model(plan)))
    assert "8.0 MiB" in finding.seen
    assert f"{host_weights_bytes(plan) / GIB:.1f} GiB" in finding.seen
    assert [remedy.when for remedy in finding.remedies] == ["now", "for good", "for good"]


def test_gpu_memory_names_the_processes_that_use_it() -> None:
    given = facts(
        card(vram_bytes=96 * GIB, free_bytes=20 * GIB),
        model=model(planned(1)),
        gpu_states=(GpuState(0, holders=(MemoryHolder("vllm", 77, 76 * GIB),)),),
    )
    finding = said(gpus.gpu_memory, given)
    assert "20.0 GiB of 96.0 GiB" in finding.seen
    assert "vllm (77) 76.0 GiB" in finding.seen
    assert [remedy.command for remedy in finding.remedies] == ["kill 77"]


def engine(*, alive: bool, supervised: bool) -> DoctorEngine:
    pid = Pid(4711, 1, "boot")
    record = Record(
        "kimi", "native", pid, pid, "socket", "Kimi", "id", "b1", ("x",), 0.0, "/state/its log", detached=True
    )
    return DoctorEngine(record, alive, supervised)


@pytest.mark.parametrize(
    ("alive", "supervised", "severity", "command"),
    [
        (True, True, "fine", None),
        (True, False, "problem", "kill 4711"),
        (False, False, "advice", "tail '/state/its log'"),
    ],
)
def test_engines_on_record(alive: bool, supervised: bool, severity: Severity, command: str | None) -> None:
    finding = said(engines.engine_records, facts(engines=(engine(alive=alive, supervised=supervised),)))
    assert finding.severity == severity
    assert [remedy.command for remedy in finding.remedies][:1] == ([command] if command else [])


def test_gpu_memory_of_a_tokenmill_engine_is_fine() -> None:
    states = (GpuState(0, holders=(MemoryHolder("python3", 4711, 14 * GIB),)),)
    given = facts(card(free_bytes=10 * GIB), gpu_states=states, engines=(engine(alive=True, supervised=True),))
    assert said(gpus.gpu_memory, given).severity == "fine"


def test_a_cold_split_model_is_read_with_one_command() -> None:
    paths = (Path("/srv/my models/k-00001-of-00002.gguf"), Path("/srv/my models/k-00002-of-00002.gguf"))
    finding = said(
        storage.page_cache, facts(model=model(paths=paths, cached_bytes=10 * GIB, file_bytes=610 * GIB, disk_gb_s=0.5))
    )
    for fact in ("10.0 GiB", "610.0 GiB", "21 min"):
        assert fact in finding.seen
    assert finding.remedies[0].command == "cat '/srv/my models'/*.gguf > /dev/null"


def test_a_limit_is_removed_in_the_unit_that_sets_it() -> None:
    groups = (
        CgroupFacts("/mill.slice/x.service/worker"),
        CgroupFacts("/mill.slice/x.service"),
        CgroupFacts("/mill.slice", max_bytes=16 * GIB),
    )
    finding = said(limits.memory_limit, facts(limited(cgroup_memory_bytes=16 * GIB), groups=groups))
    assert finding.remedies[0].command == "sudo systemctl set-property --runtime mill.slice MemoryMax=infinity"
    inside = replace(limited(cgroup_memory_bytes=16 * GIB), container="podman")
    assert said(limits.memory_limit, facts(inside)).remedies[0].command == "podman run --memory=0 ..."


def test_optane_limits_the_speed_of_other_modules() -> None:
    finding = said(memory.memory_speed, facts(modules(2933, 2666, replace(MACHINE, pmem=Pmem(mode="memory")))))
    assert "persistent memory" in finding.remedies[0].command


def test_remedies_apply_now_and_permanently() -> None:
    now, good = sysctl("vm.x", 0)
    assert (now.command, now.root) == ("sudo sysctl -w vm.x=0", True)
    assert good.command == "echo 'vm.x = 0' | sudo tee -a /etc/sysctl.d/90-tokenmill.conf"
    assert good.root
    assert sysfs("/sys/x", "1")[0].command == "echo 1 | sudo tee /sys/x"
