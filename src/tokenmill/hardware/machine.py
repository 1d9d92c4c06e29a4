"""Values of a machine: CPUs, memories, GPUs, disks and links in one frozen `Machine`."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.decode import Bytes

TierKind = Literal["vram", "dram", "pmem", "disk"]
DiskKind = Literal["nvme", "ssd", "hdd", "network", "memory"]
PmemMode = Literal["memory", "app-direct", "mixed"]


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPUs, all sockets together."""

    model: str | None = None
    sockets: int | None = None
    cores: int | None = None  # physical cores, all sockets
    threads_per_core: int | None = None
    isa: tuple[str, ...] = ()  # supported ones of ISA_THAT_MATTERS
    l3_bytes: Bytes | None = None  # all instances together
    all_core_ghz: float | None = None  # sustained clock with all cores busy; stated by people, never read


ISA_THAT_MATTERS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vbmi",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "neon",
    "dotprod",
    "i8mm",
    "sve",
    "sve2",
    "bf16",
)
"""CPU flags that select kernels in llama.cpp or vLLM, with Linux's names (except `neon` for `asimd`)."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node as the kernel sees it."""

    index: int
    cpus: tuple[int, ...] = ()  # logical CPUs; empty for memory-only nodes
    memory_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    distances: tuple[int, ...] = ()  # to every node, in index order


@dataclass(frozen=True, slots=True)
class Dimm:
    """One memory module in its slot."""

    locator: str
    size_bytes: Bytes
    kind: str | None = None  # DDR4, DDR5, ...
    rated_mts: int | None = None
    configured_mts: int | None = None
    bank: str | None = None


@dataclass(frozen=True, slots=True)
class Dram:
    """Ordinary memory. With PMem in Memory Mode it is a cache of the PMem that programs cannot use directly."""

    total_bytes: Bytes | None = None  # usable by the operating system; in Memory Mode, size of the cache
    available_bytes: Bytes | None = None  # currently available without swapping; in Memory Mode, None
    kind: str | None = None
    dimms: tuple[Dimm, ...] = ()
    slots: int | None = None  # on the board, with or without modules
    channels: int | None = None  # populated, all sockets
    mts: int | None = None  # configured speed
    nominal_gb_s: float | None = None  # channels x MT/s x 8 bytes


@dataclass(frozen=True, slots=True)
class PmemNamespace:
    """One persistent-memory namespace."""

    name: str
    mode: str  # fsdax, devdax, sector, raw
    size_bytes: Bytes
    device: str | None = None  # block device or dax character device
    mount: str | None = None


@dataclass(frozen=True, slots=True)
class Pmem:
    """Optane persistent memory."""

    mode: PmemMode | None = None
    dimms: int | None = None
    total_bytes: Bytes | None = None
    memory_mode_bytes: Bytes | None = None  # volatile capacity, which the system sees as RAM
    available_bytes: Bytes | None = None  # part of it that is currently available without swapping
    namespaces: tuple[PmemNamespace, ...] = ()
    nominal_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A device's link to the host."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None

    @property
    def nominal_gb_s(self) -> float | None:
        """Rate of one direction at the highest generation and width; idle GPUs currently use a lower generation."""
        generation = self.max_generation or self.generation
        width = self.max_width or self.width
        per_lane = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}.get(generation or 0)
        return None if per_lane is None or width is None else round(per_lane * width, 1)

    @property
    def narrow(self) -> bool:
        """Whether the link uses fewer lanes than both ends support."""
        return self.width is not None and self.max_width is not None and self.width < self.max_width

    @property
    def slow(self) -> bool:
        """Whether the link uses a lower generation than both ends support, as usual for idle GPUs."""
        return self.generation is not None and self.max_generation is not None and self.generation < self.max_generation


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its memory."""

    index: int
    name: str
    vendor: Literal["nvidia", "amd", "intel"] | None = None
    vram_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    nominal_gb_s: float | None = None  # memory bandwidth
    tflops: float | None = None  # dense half precision; stated by people for cards that rates.toml does not list
    pcie: PcieLink = field(default_factory=PcieLink)
    compute_capability: str | None = None  # NVIDIA: 8.6, 9.0
    power_limit_w: float | None = None
    numa_node: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class NvLink:
    """A pair of GPUs joined by NVLink."""

    gpus: tuple[int, int]
    links: int | None = None
    nominal_gb_s: float | None = None  # one direction, all links


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap space, all devices together."""

    total_bytes: Bytes
    used_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk that holds one path."""

    path: str
    device: str | None = None
    filesystem: str | None = None
    kind: DiskKind | None = None
    total_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    nominal_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages as configured."""

    transparent: str | None = None  # always, madvise, never
    page_bytes: Bytes | None = None
    total: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process that are below the machine's size."""

    cgroup_memory_bytes: Bytes | None = None  # None: no limit
    cgroup_cpus: float | None = None  # None: no limit
    cpuset: tuple[int, ...] | None = None  # logical CPUs that this process can use; None: all
    memlock_bytes: Bytes | None = None  # None: unlimited


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured bandwidth.

    Reads count bytes read; copies count each byte once, like mbw (STREAM counts twice); gpu0 counts reads and writes.
    """

    path: str  # dram, disk, pmem, gpu0, dram->dram, pmem->dram, dram->gpu0, gpu0->dram
    gb_s: float
    threads: int | None = None  # number of threads that reached gb_s
    by_threads: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurements:
    """The bandwidths that `probe --measure` measured."""

    when: str  # ISO 8601, UTC
    rates: tuple[Rate, ...] = ()

    def gb_s(self, path: str) -> float | None:
        """Measured bandwidth of `path`; None if it was not measured."""
        return next((rate.gb_s for rate in self.rates if rate.path == path), None)


@dataclass(frozen=True, slots=True)
class Note:
    """The reason why a fact is unknown and the way to find it, or the source of a figure."""

    about: str  # dotted field name: dram.dimms, gpus[0].nominal_gb_s
    text: str


@dataclass(frozen=True, slots=True)
class Tier:
    """One memory that can hold a part of a model."""

    name: str  # gpu0, dram, pmem, disk
    kind: TierKind
    capacity_bytes: int | None
    free_bytes: int | None
    nominal_gb_s: float | None
    measured_gb_s: float | None
    cached_by: str | None = None  # Memory Mode: pmem is cached by dram


@dataclass(frozen=True, slots=True)
class Machine:
    """All facts about one machine."""

    name: str
    cpu: Cpu = field(default_factory=Cpu)
    numa: tuple[NumaNode, ...] = ()
    dram: Dram = field(default_factory=Dram)
    pmem: Pmem | None = None
    gpus: tuple[Gpu, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    swap: Swap | None = None
    disk: Disk | None = None
    huge_pages: HugePages | None = None
    limits: Limits = field(default_factory=Limits)
    container: str | None = None  # docker, podman, kubernetes, lxc, ...; None: no container
    virtual: str | None = None  # hypervisor; None: bare metal
    os: str | None = None
    measured: Measurements | None = None
    notes: tuple[Note, ...] = ()

    def tiers(self) -> tuple[Tier, ...]:
        """All memories of this machine, fastest kind first."""
        return (*self._gpu_tiers(), *self._host_tiers())

    def capability(self, tier: str) -> str | None:
        """Compute capability of a GPU tier; None for other tiers and if it is unknown."""
        return next((gpu.compute_capability for gpu in self.gpus if f"gpu{gpu.index}" == tier), None)

    def _gpu_tiers(self) -> list[Tier]:
        return [
            Tier(
                f"gpu{gpu.index}",
                "vram",
                gpu.vram_bytes,
                gpu.free_bytes,
                gpu.nominal_gb_s,
                self._measured(f"gpu{gpu.index}"),
            )
            for gpu in self.gpus
        ]

    def _host_tiers(self) -> list[Tier]:
        dram = self.dram
        pmem = self.pmem
        disk = self.disk
        tiers = []
        if pmem is not None and pmem.mode in ("memory", "mixed"):
            # The system's RAM is the PMem, and DRAM is only its cache. In mixed mode the App Direct part is storage,
            # not a tier.
            tiers.append(
                Tier(
                    "pmem",
                    "pmem",
                    pmem.memory_mode_bytes,
                    pmem.available_bytes,
                    pmem.nominal_gb_s,
                    self._measured("dram"),
                    cached_by="dram",
                )
            )
        else:
            tiers.append(
                Tier("dram", "dram", dram.total_bytes, dram.available_bytes, dram.nominal_gb_s, self._measured("dram"))
            )
            if pmem is not None:
                usable = sum(space.size_bytes for space in pmem.namespaces) or None
                tiers.append(Tier("pmem", "pmem", usable, usable, pmem.nominal_gb_s, self._measured("pmem")))
        if disk is not None:
            tiers.append(
                Tier("disk", "disk", disk.total_bytes, disk.free_bytes, disk.nominal_gb_s, self._measured("disk"))
            )
        return tiers

    def _measured(self, path: str) -> float | None:
        return self.measured.gb_s(path) if self.measured else None
