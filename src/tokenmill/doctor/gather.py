"""Reads the facts for all checks through a `Host`, in about a second.

Counters are sampled twice, one second apart; the slow reads (the probe, nvidia-smi, the model) run concurrently in
between.
"""

import mmap
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from tokenmill.config import Config
from tokenmill.doctor import nvidia_smi
from tokenmill.doctor.facts import (
    CgroupFacts,
    Clocks,
    CounterSample,
    DoctorEngine,
    Facts,
    GpuState,
    Kernel,
    MemoryHolder,
    ModelNeeds,
    Pool,
)
from tokenmill.engine.loading.process import parse_memlock, parse_status
from tokenmill.engine.process import registry
from tokenmill.engine.process.exit_status import counter
from tokenmill.errors import UsageError
from tokenmill.hardware.dmi import read_modules
from tokenmill.hardware.host import Host, LocalHost, number
from tokenmill.hardware.limits import CGROUPS, cgroup_folder, parse_cgroup
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.memory import count_channels, parse_meminfo
from tokenmill.hardware.probe import probe
from tokenmill.native.builds.finished import with_build
from tokenmill.native.builds.gpu_support import unused_gpus
from tokenmill.units import KIB

SAMPLE_INTERVAL_S = 1.0
_CPUS = "/sys/devices/system/cpu"
_MAX_HOLDERS = 3

ReadModel = Callable[[Machine], ModelNeeds]


def gather(
    *,
    host: Host | None = None,
    config: Config | None = None,
    path: Path | None = None,
    model: ReadModel | None = None,
    pause: Callable[[float], None] = sleep,
    clock: Callable[[], float] = monotonic,
) -> Facts:
    """Read the facts of a machine; `path` is the folder of its models, `model` the model to check."""
    host = host or LocalHost()
    config = config or Config()
    engine = with_build(config.engine, config.engines_path)
    before = sample_counters(host, clock())
    with ThreadPoolExecutor(max_workers=3) as pool:
        states = pool.submit(gpu_states, host)
        machine = pool.submit(probe, path, host=host)
        channels = pool.submit(board_channels, host)
        read = None if model is None else model(machine.result())
        found = machine.result()
        pause(max(0.0, SAMPLE_INTERVAL_S - (clock() - before.time_s)))
    limits = host.text("/proc/self/limits") or ""
    known, memlock = parse_memlock(limits, host.text("/proc/self/status") or "")
    soft, hard = parse_open_files(limits)
    space = host.space("/dev/shm")  # noqa: S108  its size is the question
    used = found.swap.used_bytes if found.swap else None
    return Facts(
        machine=found,
        before=before,
        after=sample_counters(host, clock()),
        kernel=read_kernel(host),
        clocks=read_clocks(host),
        groups=read_groups(host),
        groups_seen=bool(parse_cgroup(host.text("/proc/self/cgroup") or "")),
        pools=read_pools(host),
        swapped=swap_holders(host) if used else (),
        board_channels=channels.result(),
        gpu_states=states.result(),
        shm_bytes=space[0] if space else None,
        open_files=soft,
        open_files_hard=hard,
        memlock_known=known,
        memlock_bytes=memlock,
        engine_kind=config.engine.kind,
        own_build=bool(engine.library or engine.binary or engine.container),
        unused_gpus=unused_gpus(found, engine),
        started_by_us="://" not in config.engine.kind and config.engine.container is None,
        model=read,
        engines=engine_states(config.state_path),
    )


def sample_counters(host: Host, time_s: float) -> CounterSample:
    """Read all counters."""
    vmstat = host.text("/proc/vmstat") or ""
    swapped_in = counter(vmstat, "pswpin")
    swapped_out = counter(vmstat, "pswpout")
    files = host.glob(f"{_CPUS}/cpu[0-9]*/thermal_throttle/core_throttle_count")
    throttles = [number(host.text(path)) for path in files]
    known = [count for count in throttles if count is not None]
    group = cgroup_folder(host)
    quota = (host.text(f"{group}/cpu.stat") or "") if group else ""
    return CounterSample(
        time_s=time_s,
        swapped_in_bytes=None if swapped_in is None else swapped_in * mmap.PAGESIZE,
        swapped_out_bytes=None if swapped_out is None else swapped_out * mmap.PAGESIZE,
        throttles=sum(known) if known else None,
        quota_throttles=counter(quota, "nr_throttled"),
        quota_periods=counter(quota, "nr_periods"),
    )


def read_kernel(host: Host) -> Kernel:
    """Kernel parameters, and counters since boot."""
    meminfo = parse_meminfo(host.text("/proc/meminfo") or "")
    uptime = (host.text("/proc/uptime") or "").split()
    return Kernel(
        numa_balancing=number(host.text("/proc/sys/kernel/numa_balancing")),
        zone_reclaim_mode=number(host.text("/proc/sys/vm/zone_reclaim_mode")),
        overcommit_memory=number(host.text("/proc/sys/vm/overcommit_memory")),
        commit_limit_bytes=meminfo.get("CommitLimit"),
        committed_bytes=meminfo.get("Committed_AS"),
        oom_kills=counter(host.text("/proc/vmstat") or "", "oom_kill"),
        uptime_s=float(uptime[0]) if uptime else None,
    )


def read_clocks(host: Host) -> Clocks:
    """CPU frequency settings per CPU."""

    def counted(file: str) -> dict[str, int]:
        texts = (host.text(path) for path in host.glob(f"{_CPUS}/cpu[0-9]*/cpufreq/{file}"))
        return dict(Counter(text.strip() for text in texts if text and text.strip()))

    boost, no_turbo = (number(host.text(f"{_CPUS}/{name}")) for name in ("cpufreq/boost", "intel_pstate/no_turbo"))
    return Clocks(
        governors=counted("scaling_governor"),
        drivers=counted("scaling_driver"),
        preferences=counted("energy_performance_preference"),
        boost=bool(boost) if boost is not None else None if no_turbo is None else not no_turbo,
    )


def read_groups(host: Host) -> tuple[CgroupFacts, ...]:
    """The control group of this process and its parents, innermost first."""
    folder = cgroup_folder(host)
    groups = list[CgroupFacts]()
    while folder is not None and folder != CGROUPS:
        maximum, high = (number(host.text(f"{folder}/{name}")) for name in ("memory.max", "memory.high"))
        kills = counter(host.text(f"{folder}/memory.events") or "", "oom_kill")
        share = [number(word) for word in (host.text(f"{folder}/cpu.max") or "").split()]
        cpus = share[0] / share[1] if len(share) == 2 and share[0] and share[1] else None
        groups.append(CgroupFacts(folder.removeprefix(CGROUPS), maximum, high, cpus, kills))
        folder = folder.rpartition("/")[0]
    return tuple(groups)


def read_pools(host: Host) -> tuple[Pool, ...]:
    """Reserved huge pages by size, without empty pools."""
    pools = []
    for folder in host.glob("/sys/kernel/mm/hugepages/hugepages-*kB"):
        size = int(folder.rpartition("-")[2].removesuffix("kB")) * KIB
        total = number(host.text(f"{folder}/nr_hugepages"))
        if total:
            pools.append(Pool(size, total, number(host.text(f"{folder}/free_hugepages"))))
    return tuple(pools)


def swap_holders(host: Host) -> tuple[MemoryHolder, ...]:
    """The processes with the most swap in use."""
    found = []
    for path in host.glob("/proc/[0-9]*/status"):
        text = host.text(path) or ""  # None if the process has ended
        swapped = parse_status(text).swap_bytes
        name = re.search(r"^Name:\s+(.+)$", text, re.MULTILINE)
        if swapped and name:
            found.append(MemoryHolder(name[1], int(path.split("/")[2]), swapped))
    return tuple(sorted(found, key=lambda holder: -(holder.bytes or 0))[:_MAX_HOLDERS])


def board_channels(host: Host) -> int | None:
    """Memory channels of the board, with or without modules; None if the slot names do not show them."""
    modules, _ = read_modules(host)
    return count_channels(modules)[0] if modules else None


def gpu_states(host: Host) -> tuple[GpuState, ...] | None:
    """GPU states from nvidia-smi; None if it is missing or does not answer."""
    answer = host.run(*nvidia_smi.COMMAND)
    return nvidia_smi.parse(answer.out) if answer and answer.code == 0 else None


def parse_open_files(limits: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of open files in /proc/self/limits; None: missing or unlimited."""
    found = re.search(r"^Max open files\s+(\w+)\s+(\w+)", limits, re.MULTILINE)
    soft, hard = (int(word) if word.isdigit() else None for word in (found[1], found[2])) if found else (None, None)
    return soft, hard


def engine_states(state: Path) -> tuple[DoctorEngine, ...]:
    """Registered engines, including ended ones; does not clean up the registry."""
    folder = state / "engines"
    homes = sorted(folder.iterdir()) if folder.is_dir() else []
    found = []
    for home in homes:
        with suppress(UsageError):  # not a valid engine name
            record = registry.read(state, home.name)
            if record is not None:
                found.append(DoctorEngine(record, record.alive, record.supervisor.alive))
    return tuple(found)
