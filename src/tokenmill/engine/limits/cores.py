"""Which logical CPUs an engine leaves to others when cores are reserved.

Whole cores are reserved, including their SMT siblings, because work on one sibling slows the other. They are taken
evenly from the NUMA nodes, the last cores of each first, so that no node of the engine becomes the slowest. Cores that
this process may not use count as reserved already: AllowedCPUs= in a unit and a reserve of the same size are
equivalent, and dividing twice has the same result as dividing once.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tokenmill.hardware.cpu import parse_numbers
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Machine
from tokenmill.launch.binding import Binding
from tokenmill.planner.plan import Plan

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core."""

    cpus: tuple[int, ...]  # logical, ascending
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The cores of a machine, divided between the engine and other programs."""

    kept: tuple[Core, ...]  # the engine's cores, with the logical CPUs that it may use
    left: tuple[int, ...]  # logical CPUs of other programs, including those that this process may not use

    @property
    def cpus(self) -> tuple[int, ...]:
        """All logical CPUs of the engine."""
        return tuple(sorted(cpu for core in self.kept for cpu in core.cpus))

    @property
    def first_cpus(self) -> tuple[int, ...]:
        """One logical CPU of each of the engine's cores."""
        return tuple(sorted(core.cpus[0] for core in self.kept))


def cores_here(host: Host) -> tuple[Core, ...]:
    """The cores that are switched on, as the kernel groups their CPUs; empty where it does not tell."""
    nodes = {
        cpu: int(path.rsplit("/", 2)[1].removeprefix("node"))
        for path in host.glob(f"{_NODES}/node[0-9]*/cpulist")
        for cpu in parse_numbers(host.text(path) or "")
    }
    groups = set()
    for folder in host.glob(f"{_CPUS}/cpu[0-9]*/topology"):
        # the second name is that of kernels before 5.2
        told = host.text(f"{folder}/core_cpus_list") or host.text(f"{folder}/thread_siblings_list") or ""
        if cpus := parse_numbers(told):
            groups.add(tuple(sorted(cpus)))
    return tuple(Core(cpus, nodes.get(cpus[0])) for cpus in sorted(groups))


def cores_of(machine: Machine) -> tuple[Core, ...]:
    """The cores of a machine that is described, numbered as Linux usually does: CPU c and c + cores share one."""
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
    """Leave so many cores to others; None where the engine would have none.

    `allowed`: logical CPUs that this process may use. `home`: the node that the engine's memory is on, whose cores are
    left last.
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
        kept.remove(_next_to_leave(kept, home))
    ours = {cpu for core in kept for cpu in core.cpus}
    return Division(tuple(kept), tuple(sorted(cpu for core in cores for cpu in core.cpus if cpu not in ours)))


def cpus_for(plan: Plan, pin: bool | None, bound: Binding, division: Division | None) -> tuple[int, ...] | None:
    """The CPUs of an engine: all that are not left to others; None: it is not kept to any.

    `pin` is the configuration's: None keeps it off the reserved cores, if any; True also to those near its memory, and
    to one CPU of each core unless it has more threads. `division`: default: as the plan's machine is described.
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


def _next_to_leave(kept: Sequence[Core], home: int | None) -> Core:
    """The last core of the node that has most of them."""
    others = [core for core in kept if core.node != home] or kept
    counts = Counter(core.node for core in others)
    return max(others, key=lambda core: (counts[core.node], -1 if core.node is None else core.node, core.cpus[0]))
