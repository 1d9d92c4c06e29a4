"""Chooses the logical CPUs that are reserved for other programs.

Whole cores are reserved, including their SMT siblings, because work on one sibling slows the other. They are taken
evenly from the NUMA nodes, the last cores of each first, so that no node of the engine is slower than the others. Cores
that this process may not use already count as reserved, so AllowedCPUs= in a unit is equivalent to a reserve.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Machine
from tokenmill.launch.binding import Binding
from tokenmill.planner.plan import Plan
from tokenmill.units import parse_ranges

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core."""

    cpus: tuple[int, ...]  # logical, ascending
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """Cores of the engine and CPUs reserved for other programs."""

    kept: tuple[Core, ...]  # the engine's cores, with the logical CPUs that it may use
    left: tuple[int, ...]  # reserved logical CPUs, including those that this process may not use

    @property
    def cpus(self) -> tuple[int, ...]:
        """All logical CPUs of the engine."""
        return tuple(sorted(cpu for core in self.kept for cpu in core.cpus))

    @property
    def first_cpus(self) -> tuple[int, ...]:
        """One logical CPU of each of the engine's cores."""
        return tuple(sorted(core.cpus[0] for core in self.kept))


def cores_here(host: Host) -> tuple[Core, ...]:
    """The online cores of this machine; empty if the kernel does not list them."""
    nodes = {
        cpu: int(path.rsplit("/", 2)[1].removeprefix("node"))
        for path in host.glob(f"{_NODES}/node[0-9]*/cpulist")
        for cpu in parse_ranges(host.text(path) or "")
    }
    groups = set()
    for folder in host.glob(f"{_CPUS}/cpu[0-9]*/topology"):
        # thread_siblings_list: kernels before 5.2
        siblings = host.text(f"{folder}/core_cpus_list") or host.text(f"{folder}/thread_siblings_list") or ""
        if cpus := parse_ranges(siblings):
            groups.add(tuple(sorted(cpus)))
    return tuple(Core(cpus, nodes.get(cpus[0])) for cpus in sorted(groups))


def cores_of(machine: Machine) -> tuple[Core, ...]:
    """The cores of a described machine, in Linux's usual numbering: CPUs c and c + cores are siblings."""
    count = machine.cpu.cores
    siblings = machine.cpu.threads_per_core or 1
    nodes = {cpu: node.index for node in machine.numa for cpu in node.cpus}
    return tuple(
        Core(tuple(core + count * sibling for sibling in range(siblings)), nodes.get(core))
        for core in range(count or 0)
        if count
    )


def divide(
    cores: Sequence[Core], reserve: int, *, allowed: Collection[int] | None = None, home: int | None = None
) -> Division | None:
    """Reserve a number of cores; None if no core would remain for the engine.

    allowed: logical CPUs that this process may use.
    home: NUMA node of the engine's memory, whose cores are reserved last.
    """
    kept = [
        replace(core, cpus=mine)
        for core in cores
        if (mine := tuple(cpu for cpu in core.cpus if allowed is None or cpu in allowed))
    ]
    missing = reserve - (len(cores) - len(kept))
    if not kept or missing >= len(kept):
        return None
    for _ in range(missing):
        kept.remove(_next_reserved(kept, home))
    ours = {cpu for core in kept for cpu in core.cpus}
    return Division(tuple(kept), tuple(sorted(cpu for core in cores for cpu in core.cpus if cpu not in ours)))


def cpus_for(plan: Plan, pin: bool | None, bound: Binding, division: Division | None) -> tuple[int, ...] | None:
    """The CPUs that an engine is restricted to; None: not restricted.

    pin: engine.pin_cores. None: all CPUs that are not reserved; True: only those near its memory, and one per core
        unless it has more threads than cores.
    division: default: from the plan's machine.
    """
    allowed = plan.machine.limits.cpuset
    reserve = plan.goal.reserve_cores
    home = bound.nodes[0] if bound.nodes else None
    if pin is False or (pin is None and not reserve):
        return None
    if not reserve:
        own = {cpu for node in plan.machine.numa if node.index == home for cpu in node.cpus}
        return tuple(sorted(own if allowed is None else own & set(allowed))) or None
    division = division or divide(cores_of(plan.machine), reserve, allowed=allowed, home=home)
    if division is None or pin is None:
        return None if division is None else division.cpus
    near = [core for core in division.kept if home is None or core.node == home] or list(division.kept)
    if max(plan.settings.threads, plan.settings.threads_batch) > len(near):
        return tuple(sorted(cpu for core in near for cpu in core.cpus))
    return tuple(sorted(core.cpus[0] for core in near))


def _next_reserved(kept: Sequence[Core], home: int | None) -> Core:
    """The last core of the node with the most cores."""
    others = [core for core in kept if core.node != home] or kept
    counts = Counter(core.node for core in others)
    return max(others, key=lambda core: (counts[core.node], -1 if core.node is None else core.node, core.cpus[0]))
