"""Runs all checks on a machine's facts. Pure."""

from collections.abc import Callable, Iterable

from tokenmill.doctor import engines, gpus, limits, memory, numa, processor, storage
from tokenmill.doctor.check_result import SEVERITIES, CheckResult
from tokenmill.doctor.facts import Facts

Check = Callable[[Facts], CheckResult | None]

CHECKS: tuple[Check, ...] = (
    engines.plan_fits,
    gpus.gpu_library,
    memory.swap,
    gpus.gpu_memory,
    limits.memory_limit,
    memory.memlock,
    memory.oom_kills,
    storage.disk_speed,
    storage.file_system,
    storage.page_cache,
    memory.memory_channels,
    memory.memory_speed,
    gpus.gpu_link,
    gpus.gpu_throttling,
    gpus.gpu_power,
    gpus.gpu_persistence,
    numa.numa_nodes,
    numa.numa_uneven,
    numa.numa_balancing,
    numa.zone_reclaim,
    processor.governor,
    processor.cpu_throttling,
    processor.instruction_set,
    limits.cpu_limit,
    memory.huge_pages,
    memory.reserved_pages,
    memory.overcommit,
    limits.shared_memory,
    limits.open_files,
    engines.engine_records,
)
"""Ordered by the size of the effect; results of equal severity keep this order."""


def examine(facts: Facts) -> tuple[CheckResult, ...]:
    """The results of all checks that apply, sorted by severity."""
    return by_severity(finding for check in CHECKS if (finding := check(facts)) is not None)


def by_severity(findings: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """Sort results by severity: problem, advice, unknown, fine."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
