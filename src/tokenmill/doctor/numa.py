"""Checks of NUMA nodes."""

from tokenmill.doctor.check_result import CheckResult, Remedy, sysctl
from tokenmill.doctor.facts import Facts
from tokenmill.hardware.machine import NumaNode
from tokenmill.units import format_bytes

FULL, EMPTY = 0.05, 0.3  # free share of memory below and above which a node counts as full or empty


def numa_nodes(facts: Facts) -> CheckResult | None:
    """Several NUMA nodes, on which memory must be interleaved or everything bound to one node."""
    if not facts.machine.numa:
        return CheckResult(
            "numa-nodes", "unknown", "the kernel shows no NUMA nodes", "numactl --hardware may show them"
        )
    nodes = _with_memory(facts)
    if len(nodes) < 2:
        return CheckResult("numa-nodes", "fine", "one NUMA node")
    sizes = ", ".join(format_bytes(node.memory_bytes or 0) for node in nodes)
    if facts.started_by_us:
        how = "tokenmill binds the engines it starts to one node or spreads them over all"
        return CheckResult("numa-nodes", "fine", f"{len(nodes)} NUMA nodes ({sizes}); {how}")
    return CheckResult(
        "numa-nodes",
        "advice",
        f"{len(nodes)} NUMA nodes ({sizes})",
        "by default a model lies on the node that loaded it, and the CPUs of the others read it slowly: interleaving "
        "gave 7 % on a dual Xeon, and published runs on two sockets differ by a factor of three",
        "colibri issue 82; docs/forecast-errors.md",
        (
            Remedy("now", "numactl --interleave=all llama-server ...", note="for a model larger than one node"),
            Remedy(
                "now", "numactl --cpunodebind=0 --membind=0 llama-server ...", note="for a model that fits on one node"
            ),
        ),
    )


def numa_uneven(facts: Facts) -> CheckResult | None:
    """Nodes that are filled unevenly, usually by the page cache of an earlier load."""
    nodes = [node for node in _with_memory(facts) if node.free_bytes is not None]
    if len(nodes) < 2:
        return None
    free = {node.index: (node.free_bytes or 0) / (node.memory_bytes or 1) for node in nodes}
    fullest = min(free, key=free.__getitem__)
    emptiest = max(free, key=free.__getitem__)
    if free[fullest] > FULL or free[emptiest] < EMPTY:
        return CheckResult("numa-uneven", "fine", "memory use is similar on all nodes")
    return CheckResult(
        "numa-uneven",
        "advice",
        f"node {fullest} has {100 * free[fullest]:.0f} % of its memory free, node {emptiest} has "
        f"{100 * free[emptiest]:.0f} %",
        "pages cached by an earlier load stay on their node, and a new engine reads them from there",
        "llama.cpp issue 1437",
        (
            Remedy(
                "now",
                "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
                note="before the next start, which then loads cold",
            ),
        ),
    )


def numa_balancing(facts: Facts) -> CheckResult | None:
    """Automatic NUMA balancing, in which the kernel moves pages between nodes."""
    value = facts.kernel.numa_balancing
    if len(_with_memory(facts)) < 2:
        return None
    if value is None:
        return CheckResult("numa-balancing", "unknown", "kernel.numa_balancing cannot be read")
    if value == 0:
        return CheckResult("numa-balancing", "fine", "automatic NUMA balancing is off")
    return CheckResult(
        "numa-balancing",
        "advice",
        "kernel.numa_balancing is on",
        "the kernel unmaps pages to detect their use and moves them between nodes, which slows llama.cpp down",
        "llama.cpp, ggml-cpu.c, warning at start",
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
        return CheckResult("zone-reclaim", "fine", "a full node uses memory of the others")
    return CheckResult(
        "zone-reclaim",
        "problem",
        f"vm.zone_reclaim_mode is {value}",
        "a full node drops cached pages, including the model's, while other nodes have free memory",
        "kernel documentation, sysctl/vm; Linux commit 4f9b16a64753",
        sysctl("vm.zone_reclaim_mode", 0),
    )


def _with_memory(facts: Facts) -> list[NumaNode]:
    return [node for node in facts.machine.numa if node.memory_bytes]
