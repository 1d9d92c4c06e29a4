"""Diagnoses slow loads: findings with the likely cause and a command that helps.

`diagnose` is pure over `LoadFacts`, which `facts` computes from samples. A load is slow compared with the plan's
forecast or the speed of the disk; if both are unknown, no load is called slow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tokenmill.engine.loading.progress import LoadProgress, Sample
from tokenmill.engine.loading.system import System
from tokenmill.engine.logs.faults import MEMLOCK
from tokenmill.launch.binding import binding, host_weights_bytes
from tokenmill.launch.parse.parsed import Finding
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB, format_bytes, format_bytes_s, format_seconds

SLOWER_THAN_FORECAST = 1.5  # times
SHARE_OF_DISK = 0.5
MIN_ELAPSED_S = 10.0  # the rate varies too much before
STALL_S = 60.0
SWAPPING_BYTES_S = MIB
PRESSURE = 0.2
BUSY = 0.9
ONE_SIDED = 0.9  # share of the allocated memory on one NUMA node
SMALL_READ_BYTES = 64 << 10
WINDOW_S = 30.0

Snapshot = TypeVar("Snapshot", System, Sample)


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """Facts about a load between two samples; rates are averages over that time. None: unknown."""

    elapsed_s: float  # since the start
    bytes_loaded: int | None = None
    bytes_total: int | None = None
    rate_bytes_s: float | None = None
    forecast_s: float | None = None  # of the whole load
    disk_expected_bytes_s: float | None = None
    disk_measured: bool = False  # disk_expected_bytes_s was measured, not stated by the machine description
    disk: str | None = None
    disk_rate_bytes_s: float | None = None  # reads of all processes
    disk_busy: float | None = None
    own_disk_rate_bytes_s: float | None = None  # reads of the engine
    network: bool = False  # the model is on a network file system
    major_faults_s: float | None = None
    swap_in_bytes_s: float | None = None
    swap_out_bytes_s: float | None = None
    io_waits: float | None = None  # pressure: share of the last ten seconds
    memory_waits: float | None = None
    available_bytes: int | None = None
    node_growth_bytes: dict[int, int] = field(default_factory=dict)
    spread: bool = False  # the plan spreads memory over all nodes
    cgroup: str | None = None
    cgroup_high_bytes: int | None = None
    throttled: int | None = None  # number of times
    mlock_bytes: int | None = None  # locked by the plan; None: not locked
    memlock_known: bool = False
    memlock_bytes: int | None = None  # limit; None: unlimited, if known
    idle_s: float = 0.0  # since bytes were last loaded

    @property
    def expected_s(self) -> float | None:
        """Duration of the whole load at the current rate."""
        if not self.rate_bytes_s or self.bytes_loaded is None or self.bytes_total is None:
            return None
        return self.elapsed_s + (self.bytes_total - self.bytes_loaded) / self.rate_bytes_s


def slow(facts: LoadFacts) -> str | None:
    """Describe how a load is slow; None if it is not, is complete, or cannot be compared with anything."""
    done = facts.bytes_loaded is not None and facts.bytes_total is not None and facts.bytes_loaded >= facts.bytes_total
    if facts.elapsed_s < MIN_ELAPSED_S or done:
        return None
    expected = facts.expected_s
    forecast = facts.forecast_s
    if forecast and forecast >= MIN_ELAPSED_S and expected and expected > SLOWER_THAN_FORECAST * forecast:
        return f"the load will take {format_seconds(expected)}, the forecast was {format_seconds(forecast)}"
    rate = facts.rate_bytes_s
    disk = facts.disk_expected_bytes_s
    if not forecast and rate is not None and disk and rate < SHARE_OF_DISK * disk:
        return f"loading at {format_bytes_s(rate)}, the disk can read {format_bytes_s(disk)}"
    if (forecast or disk) and facts.idle_s >= STALL_S:
        return f"nothing was loaded for {format_seconds(facts.idle_s)}"
    return None


def diagnose(facts: LoadFacts) -> tuple[Finding, ...]:
    """Findings about a load: why it is slow, most likely cause first, and settings that will not take effect."""
    slowness = slow(facts)
    findings = [] if slowness is None else [*_swap(facts), *_throttle(facts), *_disk(facts), *_pressure(facts)]
    if slowness is not None and not findings:
        hint = "cat /proc/PID/stack and top -H show what it waits for" if facts.idle_s >= STALL_S else None
        findings.append(Finding("warning", f"{slowness}; disk and memory do not explain it", hint))
    elif slowness is not None:
        findings.insert(0, Finding("warning", slowness))
    return (*findings, *_locking(facts), *_nodes(facts))


def _swap(facts: LoadFacts) -> Iterator[Finding]:
    swap_out = facts.swap_out_bytes_s or 0.0
    swap_in = facts.swap_in_bytes_s or 0.0
    if max(swap_out, swap_in) < SWAPPING_BYTES_S:
        return
    left = "" if facts.available_bytes is None else f", {format_bytes(facts.available_bytes)} of memory available"
    yield Finding(
        "warning",
        f"swapping {format_bytes_s(swap_out)} out and {format_bytes_s(swap_in)} in{left}",
        "ps aux --sort=-rss | head shows what uses memory; use --mmap, a smaller --context or a smaller quant",
    )


def _throttle(facts: LoadFacts) -> Iterator[Finding]:
    if not facts.throttled or facts.cgroup_high_bytes is None:
        return
    yield Finding(
        "warning",
        f"the control group exceeded its memory.high of {format_bytes(facts.cgroup_high_bytes)} and was throttled "
        f"{facts.throttled} times",
        f"echo max | sudo tee {facts.cgroup}/memory.high, or MemoryHigh=infinity in the unit",
    )


def _disk(facts: LoadFacts) -> Iterator[Finding]:
    rate = facts.own_disk_rate_bytes_s
    expected = facts.disk_expected_bytes_s
    if facts.network:
        yield Finding(
            "warning",
            f"the model is on a network file system, read at {format_bytes_s(rate or 0.0)}",
            "copy it to a local disk: cp --sparse=never MODEL /local/",
        )
        return
    if rate is None or not rate:
        return
    known = (
        ""
        if expected is None
        else f" of the {format_bytes_s(expected)} {'measured' if facts.disk_measured else 'stated'}"
    )
    if expected is not None and rate >= SHARE_OF_DISK * expected:
        return
    others = (facts.disk_rate_bytes_s or 0.0) - rate
    if others > max(rate, SWAPPING_BYTES_S):
        yield Finding(
            "warning",
            f"the disk reads {format_bytes_s(rate)}{known} for the engine, and {format_bytes_s(others)} for other "
            "processes",
            "sudo iotop -oPa shows them",
        )
        return
    per_fault = rate / facts.major_faults_s if facts.major_faults_s else None
    if per_fault is not None and per_fault < SMALL_READ_BYTES and (facts.disk_busy or 0.0) < BUSY:
        yield Finding(
            "warning",
            f"the disk reads {format_bytes_s(rate)}{known}: page faults read only {format_bytes(round(per_fault))} "
            "each",
            "read it ahead with cat MODEL* > /dev/null, or load with --no-mmap",
        )
    elif facts.disk_busy is not None and facts.disk_busy >= BUSY:
        yield Finding(
            "warning",
            f"the disk reads {format_bytes_s(rate)}{known} and is busy {facts.disk_busy:.0%} of the time",
            f"this is its maximum; check it with tokenmill probe --measure and sudo smartctl -a /dev/{facts.disk}",
        )
    elif expected is not None:
        yield Finding(
            "warning",
            f"the disk reads {format_bytes_s(rate)}{known} and is not fully used",
            "the engine reads with one thread; cat MODEL* > /dev/null in parallel fills the page cache",
        )


def _pressure(facts: LoadFacts) -> Iterator[Finding]:
    if (facts.memory_waits or 0.0) >= PRESSURE:
        yield Finding(
            "warning",
            f"processes waited for memory in {facts.memory_waits:.0%} of the last ten seconds",
            "see ps aux --sort=-rss | head; use --reserve-ram for other programs",
        )
    elif (facts.io_waits or 0.0) >= PRESSURE and facts.own_disk_rate_bytes_s is None:
        yield Finding(
            "note",
            f"processes waited for I/O in {facts.io_waits:.0%} of the last ten seconds",
            "iostat -x 1 shows the disk",
        )


def _locking(facts: LoadFacts) -> Iterator[Finding]:
    need = facts.mlock_bytes
    limit = facts.memlock_bytes
    if need is None or not facts.memlock_known or limit is None or limit >= need:
        return
    yield Finding("warning", f"mlock needs {format_bytes(need)}, the limit is {format_bytes(limit)}", MEMLOCK)


def _nodes(facts: LoadFacts) -> Iterator[Finding]:
    grown = {node: size for node, size in facts.node_growth_bytes.items() if size > 0}
    total = sum(grown.values())
    if not facts.spread or len(facts.node_growth_bytes) < 2 or total < 1024 * MIB:
        return
    node = max(grown, key=grown.__getitem__)
    if grown[node] < ONE_SIDED * total:
        return
    yield Finding(
        "warning",
        f"{grown[node] / total:.0%} of the memory is on NUMA node {node} of {len(facts.node_growth_bytes)}: access "
        "from the other nodes is slow",
        "drop the page cache (sync; echo 3 | sudo tee /proc/sys/vm/drop_caches), because cached pages do not move, and "
        "start the engine with numactl --interleave=all",
    )


def facts(
    plan: Plan,
    systems: Sequence[System],
    samples: Sequence[Sample],
    progress: LoadProgress,
    *,
    idle_s: float = 0.0,
    warm: bool = False,
) -> LoadFacts:
    """Compute facts from samples of the machine and of the engine's processes. `warm`: the file was cached before.

    Rates are averages over the last `WINDOW_S`; elapsed time and growth count from the first sample.
    """
    before = recent(systems)
    after = systems[-1]
    first = recent(samples)
    last = samples[-1]
    machine = plan.machine
    measured = machine.measured.gb_s("disk") if machine.measured else None
    stated = machine.disk.nominal_gb_s if machine.disk else None
    expected = measured if measured is not None else stated
    span = after.time_s - before.time_s
    sample_span = last.time_s - first.time_s
    busy = _per_second(before.disk_busy_s, after.disk_busy_s, span)
    throttled = _increase(after.cgroup_throttled, before.cgroup_throttled)
    forecast = plan.forecast.load_warm_s if warm else plan.forecast.load_cold_s
    return LoadFacts(
        elapsed_s=after.time_s - systems[0].time_s,
        bytes_loaded=progress.bytes_loaded,
        bytes_total=progress.bytes_total,
        rate_bytes_s=progress.rate_bytes_s,
        forecast_s=forecast,
        disk_expected_bytes_s=None if expected is None else expected * 1e9,
        disk_measured=measured is not None,
        disk=after.disk,
        disk_rate_bytes_s=_per_second(before.disk_read_bytes, after.disk_read_bytes, span),
        disk_busy=None if busy is None else min(1.0, busy),
        own_disk_rate_bytes_s=_per_second(first.disk_bytes, last.disk_bytes, sample_span),
        network=machine.disk is not None and machine.disk.kind == "network",
        major_faults_s=_per_second(first.major_faults, last.major_faults, sample_span),
        swap_in_bytes_s=_per_second(before.swapped_in_bytes, after.swapped_in_bytes, span),
        swap_out_bytes_s=_per_second(before.swapped_out_bytes, after.swapped_out_bytes, span),
        io_waits=after.io.some,
        memory_waits=after.memory.some,
        available_bytes=after.available_bytes,
        node_growth_bytes={
            node: size - systems[0].node_bytes[node]
            for node, size in after.node_bytes.items()
            if node in systems[0].node_bytes
        },
        spread=binding(plan).interleave,
        cgroup=after.cgroup,
        cgroup_high_bytes=after.cgroup_high_bytes,
        throttled=throttled,
        mlock_bytes=host_weights_bytes(plan) if plan.settings.mlock else None,
        memlock_known=after.memlock_known,
        memlock_bytes=after.memlock_bytes,
        idle_s=idle_s,
    )


def recent(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The start of the interval for rates: the oldest snapshot in `WINDOW_S`, else the last but one."""
    inside = [each for each in snapshots[:-1] if snapshots[-1].time_s - each.time_s <= WINDOW_S]
    return inside[0] if inside else snapshots[max(0, len(snapshots) - 2)]


def _increase(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else max(0, after - before)


def _per_second(before: float | None, after: float | None, span_s: float) -> float | None:
    if before is None or after is None or span_s <= 0:
        return None
    return max(0.0, (after - before) / span_s)
