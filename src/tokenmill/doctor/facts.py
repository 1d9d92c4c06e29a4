"""Everything the checks look at, as plain values. None is "not there or not allowed to see", never zero."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.engine.process.registry import Record
from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A process and how much of something it holds."""

    name: str
    pid: int
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters that only grow; two looks make a rate."""

    time_s: float
    swapped_in_bytes: int | None = None
    swapped_out_bytes: int | None = None
    throttles: int | None = None  # of all cores, for heat
    quota_throttles: int | None = None  # of our control group, for having used its processor time up
    quota_periods: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """Parameters and counters of the kernel."""

    numa_balancing: int | None = None
    zone_reclaim_mode: int | None = None
    overcommit_memory: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None
    oom_kills: int | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """How the processors' clocks are chosen; names to how many CPUs have them."""

    governors: dict[str, int] = field(default_factory=dict)
    drivers: dict[str, int] = field(default_factory=dict)
    preferences: dict[str, int] = field(default_factory=dict)  # energy_performance_preference
    boost: bool | None = None


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """A control group around this process, where it is of the second version."""

    path: str
    max_bytes: int | None = None
    high_bytes: int | None = None  # above it the kernel slows the group down
    cpus: float | None = None
    oom_kills: int | None = None  # in it and below

    @property
    def unit(self) -> str | None:
        """The systemd unit it belongs to."""
        parts = self.path.strip("/").split("/")
        return next((part for part in reversed(parts) if part.endswith((".service", ".scope", ".slice"))), None)


@dataclass(frozen=True, slots=True)
class Pool:
    """Huge pages that were set aside."""

    page_bytes: int
    total: int
    free: int | None


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVIDIA's own tool says of a card at this moment."""

    index: int
    persistent: bool | None = None
    utilisation: float | None = None  # 0 to 1
    temperature_c: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowed_by: tuple[str, ...] = ()  # reasons for lower clocks that are active
    slowed_s: dict[str, float] = field(default_factory=dict)  # and for how long they were, since the driver started
    device_generation: int | None = None  # PCIe, of the card alone
    holders: tuple[MemoryHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model and what it needs here."""

    name: str  # as it was asked about
    plan: Plan
    paths: tuple[Path, ...] = ()  # empty: a catalogue name, or an address
    cached_bytes: int | None = None  # of its files, in memory now
    file_bytes: int | None = None  # data, holes left out
    disk_gb_s: float | None = None
    disk_measured: bool = False  # just now or in the machine file, rather than stated


@dataclass(frozen=True, slots=True)
class DoctorEngine:
    """An engine on record and what is left of it."""

    record: Record
    alive: bool
    minded: bool  # the process that looks after it lives


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine at one moment."""

    machine: Machine
    before: CounterSample
    after: CounterSample
    kernel: Kernel = field(default_factory=Kernel)
    clocks: Clocks = field(default_factory=Clocks)
    groups: tuple[CgroupFacts, ...] = ()  # our own first, then those above it
    groups_seen: bool = False  # the kernel tells which groups we are in, of either version
    pools: tuple[Pool, ...] = ()
    swapped: tuple[MemoryHolder, ...] = ()  # who has most in swap
    board_channels: int | None = None  # memory channels with slots, filled or not
    gpu_states: tuple[GpuState, ...] | None = None  # None: nvidia-smi did not answer
    shm_bytes: int | None = None  # size of /dev/shm
    open_files: int | None = None  # soft limit
    open_files_hard: int | None = None
    memlock_known: bool = False
    memlock_bytes: int | None = None  # None, if known: all
    engine_kind: str = "native"
    own_build: bool = False  # a library, binary or container of the user's own
    started_by_us: bool = True  # engines get their cores and memory nodes from the plan
    model: ModelNeeds | None = None
    engines: tuple[DoctorEngine, ...] = ()

    @property
    def planning(self) -> str:
        """The command that plans the model in question."""
        return f"tokenmill plan {shlex.quote(self.model.name) if self.model else 'MODEL'}"

    def rate(self, name: str) -> float | None:
        """How fast a counter grows, per second."""
        before = getattr(self.before, name)
        after = getattr(self.after, name)
        span = self.after.time_s - self.before.time_s
        return None if before is None or after is None or span <= 0 else max(0.0, (after - before) / span)
