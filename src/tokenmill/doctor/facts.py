"""The input of all checks as plain values. None means missing or unreadable."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.engine.process.registry import Record
from tokenmill.hardware.machine import Machine
from tokenmill.native.builds.gpu_support import UnusedGpus
from tokenmill.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A process and the amount of a resource that it holds."""

    name: str
    pid: int
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Monotonic counters; the rate follows from two samples."""

    time_s: float
    swapped_in_bytes: int | None = None
    swapped_out_bytes: int | None = None
    throttles: int | None = None  # thermal throttling events of all cores
    quota_throttles: int | None = None  # throttles of this control group by its CPU quota
    quota_periods: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernel parameters and counters."""

    numa_balancing: int | None = None
    zone_reclaim_mode: int | None = None
    overcommit_memory: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None
    oom_kills: int | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU frequency settings: value -> number of CPUs."""

    governors: dict[str, int] = field(default_factory=dict)
    drivers: dict[str, int] = field(default_factory=dict)
    preferences: dict[str, int] = field(default_factory=dict)  # energy_performance_preference
    boost: bool | None = None


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """A version 2 control group that contains this process."""

    path: str
    max_bytes: int | None = None
    high_bytes: int | None = None  # above it the kernel throttles the group
    cpus: float | None = None
    oom_kills: int | None = None  # kills in this group and its children

    @property
    def unit(self) -> str | None:
        """The systemd unit it belongs to."""
        parts = self.path.strip("/").split("/")
        return next((part for part in reversed(parts) if part.endswith((".service", ".scope", ".slice"))), None)


@dataclass(frozen=True, slots=True)
class Pool:
    """Reserved huge pages of one size."""

    page_bytes: int
    total: int
    free: int | None


@dataclass(frozen=True, slots=True)
class GpuState:
    """State of a GPU as nvidia-smi reports it."""

    index: int
    persistent: bool | None = None
    utilization: float | None = None  # 0 to 1
    temperature_c: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowed_by: tuple[str, ...] = ()  # active reasons for lower clocks
    slowed_s: dict[str, float] = field(default_factory=dict)  # seconds per reason since the driver was loaded
    device_generation: int | None = None  # highest PCIe generation of the GPU itself
    holders: tuple[MemoryHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model and its requirements on this machine."""

    name: str  # as given by the user
    plan: Plan
    paths: tuple[Path, ...] = ()  # empty: a catalogue name, or an address
    cached_bytes: int | None = None  # bytes of its files in the page cache
    file_bytes: int | None = None  # allocated bytes of its files, without holes
    disk_gb_s: float | None = None
    disk_measured: bool = False  # the rate was measured, now or in the machine file; False: nominal


@dataclass(frozen=True, slots=True)
class DoctorEngine:
    """A registered engine and its state."""

    record: Record
    alive: bool
    supervised: bool  # its supervisor is running


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one machine at one moment."""

    machine: Machine
    before: CounterSample
    after: CounterSample
    kernel: Kernel = field(default_factory=Kernel)
    clocks: Clocks = field(default_factory=Clocks)
    groups: tuple[CgroupFacts, ...] = ()  # this process's group first, then its parents
    groups_seen: bool = False  # whether the kernel lists this process's control groups, version 1 or 2
    pools: tuple[Pool, ...] = ()
    swapped: tuple[MemoryHolder, ...] = ()  # processes with the most swap
    board_channels: int | None = None  # memory channels of the board, with or without modules
    gpu_states: tuple[GpuState, ...] | None = None  # None: nvidia-smi did not answer
    shm_bytes: int | None = None  # size of /dev/shm
    open_files: int | None = None  # soft limit
    open_files_hard: int | None = None
    memlock_known: bool = False
    memlock_bytes: int | None = None  # None, if known: unlimited
    engine_kind: str = "native"
    own_build: bool = False  # the user provides a library, binary or container
    unused_gpus: UnusedGpus | None = None  # GPUs that the llama.cpp library in use cannot use
    started_by_us: bool = True  # tokenmill starts the engines and binds them to CPUs and memory nodes
    model: ModelNeeds | None = None
    engines: tuple[DoctorEngine, ...] = ()

    @property
    def planning(self) -> str:
        """The command that plans the model."""
        return f"tokenmill plan {shlex.quote(self.model.name) if self.model else 'MODEL'}"

    def rate(self, name: str) -> float | None:
        """Rate of a counter, per second."""
        before = getattr(self.before, name)
        after = getattr(self.after, name)
        span = self.after.time_s - self.before.time_s
        return None if before is None or after is None or span <= 0 else max(0.0, (after - before) / span)
