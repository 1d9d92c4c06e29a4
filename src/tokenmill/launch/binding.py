"""Which processors and NUMA nodes an engine is bound to, and how much host memory it may take.

Pure arithmetic over a plan: the writers spell it for a shell, podman, systemd and compose. Knows no topology beyond
the machine's: where siblings are not told, Linux's usual order is assumed (CPU c and c + cores share a core).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.hardware.machine import Machine, NumaNode
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

HOST_TIERS = ("dram", "pmem")
LEAST_HOST_BYTES = 2 * GIB  # below this a model is on GPUs, and where the host keeps the rest does not matter


@dataclass(frozen=True, slots=True)
class Binding:
    """What of the host the engine gets."""

    cpus: tuple[int, ...] | None  # None: all of them
    nodes: tuple[int, ...] | None  # NUMA nodes it is bound to; None: not bound
    interleave: bool  # spread memory over all nodes
    memory_max_bytes: int

    @property
    def cpu_list(self) -> str | None:
        """`0-12,16-28`, as taskset, cpusets and systemd read it."""
        return None if self.cpus is None else ranges(self.cpus)

    @property
    def node_list(self) -> str | None:
        """`0` or `0-1`."""
        return None if self.nodes is None else ranges(self.nodes)

    @property
    def numa(self) -> bool:
        """Whether memory is bound or interleaved at all."""
        return self.interleave or self.nodes is not None


def binding(plan: Plan) -> Binding:
    """Bind an engine for a plan: leave the reserved cores alone, keep memory near or spread it evenly."""
    node = _one_node(plan)
    nodes = None if node is None else (node.index,)
    interleave = node is None and host_bytes(plan) >= LEAST_HOST_BYTES and _several_nodes_possible(plan.machine)
    return Binding(_cpus(plan, node), nodes, interleave, _memory_max(plan))


def host_bytes(plan: Plan) -> int:
    """Host memory that the engine itself takes at most; reserves are not its own."""
    return max(
        sum(row.bytes for row in rows if row.tier in HOST_TIERS and row.item != "reserve")
        for rows in (plan.ledger.load_peak, plan.ledger.after_load, plan.ledger.full_context)
    )


def mapped_bytes(plan: Plan) -> int:
    """Weights that a mapped plan goes on reading through the page cache; not those that it copies or rewrites."""
    if not plan.settings.mmap:
        return 0
    held = sum(row.bytes for row in plan.ledger.full_context if row.tier in HOST_TIERS and row.item == "weights")
    return held - sum(row.bytes for row in plan.ledger.page_cache if row.tier in HOST_TIERS)


def host_weights_bytes(plan: Plan) -> int:
    """Weights in host memory, rewritten ones too: what an engine may lock at most."""
    return sum(
        row.bytes for row in plan.ledger.after_load if row.tier in HOST_TIERS and row.item in ("weights", "repack")
    )


def ranges(numbers: Iterable[int]) -> str:
    """`0-12,16`: ascending numbers, runs joined."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _several_nodes_possible(machine: Machine) -> bool:
    """Unknown counts as possible: interleaving costs nothing on one node and a third of the speed if missing on two."""
    return len([node for node in machine.numa if node.memory_bytes != 0]) != 1


def _one_node(plan: Plan) -> NumaNode | None:
    """The node that can hold everything and has enough processors; the first GPU's before others, larger first."""
    nodes = [node for node in plan.machine.numa if node.cpus]
    if len(nodes) < 2 or host_bytes(plan) < LEAST_HOST_BYTES:
        return None
    per_core = plan.machine.cpu.threads_per_core or 1
    used = {int(tier[3:]) for tier in plan.placement.gpus}
    near = next((gpu.numa_node for gpu in plan.machine.gpus if gpu.index in used), None)
    fitting = [
        node
        for node in nodes
        if (node.memory_bytes or 0) >= host_bytes(plan) and len(node.cpus) // per_core >= plan.settings.threads
    ]
    return min(fitting, key=lambda node: (node.index != near, -(node.memory_bytes or 0), node.index), default=None)


def _cpus(plan: Plan, node: NumaNode | None) -> tuple[int, ...] | None:
    """Logical CPUs that leave the last cores to the pipeline; siblings only where the plan's threads need them."""
    cores = plan.machine.cpu.cores
    allowed = plan.machine.limits.cpuset
    reserve = plan.goal.reserve_cores
    if cores is None or reserve <= 0 or reserve >= cores:
        return None
    threads = max(plan.settings.threads, plan.settings.threads_batch)
    kept = set(range(cores - reserve))
    if node is not None:
        # cores of other nodes are left to the pipeline anyway
        own = {cpu for cpu in node.cpus if cpu < cores}
        kept = own if cores - len(own) >= reserve else own & kept
    if threads > len(kept) and (plan.machine.cpu.threads_per_core or 1) > 1:
        kept |= {cpu + cores for cpu in kept}
    if allowed is not None:
        kept &= set(allowed)
    return tuple(sorted(kept)) or None


def _memory_max(plan: Plan) -> int:
    """What the engine needs at its peak and a twentieth more, in whole GiB: enough for it, and the rest is safe."""
    need = host_bytes(plan)
    room = max(2 * GIB, need // 20)
    return -(-(need + room) // GIB) * GIB
