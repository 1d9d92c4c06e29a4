"""Checks of NUMA nodes."""

from tokenmill.doctor.check_result import CheckResult, Remedy, sysctl
from tokenmill.doctor.facts import Facts
from tokenmill.hardware.machine import NumaNode
from tokenmill.units import format_bytes

FULL, EMPTY = 0.05, 0.3  # free shares of a node


def numa_nodes(facts: Facts) -> CheckResult | None:
    """Machines with several nodes: memory must be interleaved, or everything bound to one node."""
    if not facts.machine.numa:
        return CheckResult(
            "numa-nodes", "unknown", "the kernel shows no NUMA nodes", "numactl --hardware may show them"
        )
    nodes = _with_memory(facts)
    if len(nodes) < 2:
        return CheckResult("numa-nodes", "fine", "one NUMA node")
    sizes = ", ".join(format_bytes(node.memory_bytes or 0) for node in nodes)
    if facts.started_by_us:
        how = "engines that tokenmill starts are bound to one node or spread over all, as the plan says"
        return CheckResult("numa-nodes", "fine", f"{len(nodes)} NUMA nodes ({sizes}); {how}")
    return CheckResult(
        "numa-nodes",
        "advice",
        f"{len(nodes)} NUMA nodes ({sizes})",
        "left alone, a model lies on the node that loaded it and the others' processors wait for it: interleaving gave "
        "7 % on a dual Xeon, and published runs on two sockets differ threefold with the care taken",
        "colibri issue 82; docs/forecast.md",
        (
            Remedy("now", "numactl --interleave=all llama-server ...", note="a model larger than one node"),
            Remedy("now", "numactl --cpunodebind=0 --membind=0 llama-server ...", note="one that a node holds"),
        ),
    )


def numa_uneven(facts: Facts) -> CheckResult | None:
    """Unevenly filled nodes, usually by the page cache of an earlier load."""
    nodes = [node for node in _with_memory(facts) if node.free_bytes is not None]
    if len(nodes) < 2:
        return None
    free = {node.index: (node.free_bytes or 0) / (node.memory_bytes or 1) for node in nodes}
    fullest = min(free, key=free.__getitem__)
    emptiest = max(free, key=free.__getitem__)
    if free[fullest] > FULL or free[emptiest] < EMPTY:
        return CheckResult("numa-uneven", "fine", "memory is in use on all nodes alike")
    return CheckResult(
        "numa-uneven",
        "advice",
        f"node {fullest} has {100 * free[fullest]:.0f} % of its memory free, node {emptiest} has "
        f"{100 * free[emptiest]:.0f} %",
        "pages cached by an earlier load stay where they are, and a new engine reads them from there",
        "llama.cpp issue 1437",
        (
            Remedy(
                "now", "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches", note="before the next start; it is cold then"
            ),
        ),
    )


def numa_balancing(facts: Facts) -> CheckResult | None:
    """Automatic NUMA balancing, with which the kernel moves pages between nodes."""
    value = facts.kernel.numa_balancing
    if len(_with_memory(facts)) < 2:
        return None
    if value is None:
        return CheckResult("numa-balancing", "unknown", "kernel.numa_balancing cannot be read")
    if value == 0:
        return CheckResult("numa-balancing", "fine", "the kernel does not move pages between nodes by itself")
    return CheckResult(
        "numa-balancing",
        "advice",
        "kernel.numa_balancing is on",
        "the kernel unmaps pages to see who uses them and moves them about; llama.cpp warns that this slows it",
        "llama.cpp, ggml-cpu.c, its own warning at start",
        sysctl("kernel.numa_balancing", 0),
    )


def zone_reclaim(facts: Facts) -> CheckResult | None:
    """Zone reclaim, which drops a node's page cache before using another node's memory."""
    value = facts.kernel.zone_reclaim_mode
    if len(_with_memory(facts)) < 2:
        return None
    if value is None:
        return CheckResult("zone-reclaim", "unknown", "vm.zone_reclaim_mode cannot be read")
    if value == 0:
        return CheckResult("zone-reclaim", "fine", "a full node takes memory from the others")
    return CheckResult(
        "zone-reclaim",
        "problem",
        f"vm.zone_reclaim_mode is {value}",
        "a node that is full drops cached pages, the model's among them, while another node is free",
        "kernel documentation, sysctl/vm; Linux commit 4f9b16a64753",
        sysctl("vm.zone_reclaim_mode", 0),
    )


def _with_memory(facts: Facts) -> list[NumaNode]:
    return [node for node in facts.machine.numa if node.memory_bytes]
