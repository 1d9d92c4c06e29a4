"""Chooses the CPUs, NUMA nodes and memory limit of an engine. Pure. Entry point: `binding`.

`launch.files` writes it for a shell, podman, systemd and compose. Sibling threads are assumed to be numbered in Linux's
usual order (CPUs c and c + cores share a core).
"""

from dataclasses import dataclass

from tokenmill.hardware.machine import Machine, NumaNode
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB, format_ranges

HOST_TIERS = ("dram", "pmem")
MIN_HOST_BYTES = 2 * GIB  # with less, the model is on GPUs and host NUMA placement does not matter


@dataclass(frozen=True, slots=True)
class Binding:
    """Host resources of an engine."""

    cpus: tuple[int, ...] | None  # None: all CPUs
    nodes: tuple[int, ...] | None  # NUMA nodes for CPUs and memory; None: unbound
    interleave: bool  # spread memory over all nodes
    memory_max_bytes: int

    @property
    def cpu_list(self) -> str | None:
        """CPUs in the format of taskset, cpusets and systemd: `0-12,16-28`."""
        return None if self.cpus is None else format_ranges(self.cpus)

    @property
    def node_list(self) -> str | None:
        """`0` or `0-1`."""
        return None if self.nodes is None else format_ranges(self.nodes)

    @property
    def numa(self) -> bool:
        """Whether memory is bound or interleaved."""
        return self.interleave or self.nodes is not None


def binding(plan: Plan) -> Binding:
    """Choose the binding: excludes reserved cores, and puts memory on one node if it fits, else interleaves it."""
    node = _one_node(plan)
    nodes = None if node is None else (node.index,)
    interleave = node is None and host_bytes(plan) >= MIN_HOST_BYTES and _several_nodes_possible(plan.machine)
    return Binding(_cpus(plan, node), nodes, interleave, _memory_max(plan))


def host_bytes(plan: Plan) -> int:
    """Maximum host memory of the engine, without reserves."""
    return max(
        sum(row.bytes for row in rows if row.tier in HOST_TIERS and row.item != "reserve")
        for rows in (plan.ledger.load_peak, plan.ledger.after_load, plan.ledger.full_context)
    )


def mapped_bytes(plan: Plan) -> int:
    """Bytes of weights used from the page cache; 0 without mmap. Copied and repacked weights are not counted."""
    if not plan.settings.mmap:
        return 0
    held = sum(row.bytes for row in plan.ledger.full_context if row.tier in HOST_TIERS and row.item == "weights")
    return held - sum(row.bytes for row in plan.ledger.page_cache if row.tier in HOST_TIERS)


def host_weights_bytes(plan: Plan) -> int:
    """Bytes of weights in host memory, repacked ones included: the maximum that an engine may lock."""
    return sum(
        row.bytes for row in plan.ledger.after_load if row.tier in HOST_TIERS and row.item in ("weights", "repack")
    )


def _several_nodes_possible(machine: Machine) -> bool:
    """Whether there may be several nodes. Interleaving costs nothing on one node; without it, two lose a third."""
    return len([node for node in machine.numa if node.memory_bytes != 0]) != 1


def _one_node(plan: Plan) -> NumaNode | None:
    """The node that holds the whole plan and has enough CPUs: the first GPU's node first, then larger ones."""
    nodes = [node for node in plan.machine.numa if node.cpus]
    if len(nodes) < 2 or host_bytes(plan) < MIN_HOST_BYTES:
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
    """Logical CPUs without the reserved last cores; sibling threads only if the plan's threads need them."""
    cores = plan.machine.cpu.cores
    allowed = plan.machine.limits.cpuset
    reserve = plan.goal.reserve_cores
    if cores is None or reserve <= 0 or reserve >= cores:
        return None
    threads = max(plan.settings.threads, plan.settings.threads_batch)
    kept = set(range(cores - reserve))
    if node is not None:
        # cores of other nodes already count as reserved
        own = {cpu for cpu in node.cpus if cpu < cores}
        kept = own if cores - len(own) >= reserve else own & kept
    if threads > len(kept) and (plan.machine.cpu.threads_per_core or 1) > 1:
        kept |= {cpu + cores for cpu in kept}
    if allowed is not None:
        kept &= set(allowed)
    return tuple(sorted(kept)) or None


def _memory_max(plan: Plan) -> int:
    """The engine's peak plus 5 % (at least 2 GiB), in whole GiB."""
    need = host_bytes(plan)
    margin = max(2 * GIB, need // 20)
    return -(-(need + margin) // GIB) * GIB
