"""Kernel settings of an engine process, from its plan and the configuration."""

from typing import cast, get_args

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.cores import Division, cpus_for
from tokenmill.engine.process.preparation import (
    HIGHEST_NICE,
    LOWEST_NICE,
    OOM_SCORE_ADJ,
    Preparation,
    Scheduling,
)
from tokenmill.errors import UsageError
from tokenmill.launch.binding import binding, host_weights_bytes
from tokenmill.planner.plan import Plan


def preparation(
    plan: Plan, config: EngineConfig, *, division: Division | None = None, group: str | None = None
) -> Preparation:
    """Create the settings. The engine always gets the highest out-of-memory score; UsageError for invalid settings.

    division: cores of the machine that it will run on; default: from the plan's machine.
    """
    if config.scheduling not in get_args(Scheduling):
        raise UsageError(
            f"engine.scheduling: unknown value {config.scheduling!r}",
            hint=f"use one of {', '.join(get_args(Scheduling))}",
        )
    if config.nice is not None and not HIGHEST_NICE <= config.nice <= LOWEST_NICE:
        raise UsageError(f"engine.nice must be {HIGHEST_NICE} (first) to {LOWEST_NICE} (last), not {config.nice}")
    bound = binding(plan)
    all_nodes = tuple(node.index for node in plan.machine.numa if node.memory_bytes)
    nodes = bound.nodes or (all_nodes if bound.interleave and len(all_nodes) > 1 else None)
    return Preparation(
        nice=config.nice,
        scheduling=cast(Scheduling, config.scheduling),
        cpus=cpus_for(plan, config.pin_cores, bound, division),
        nodes=nodes,
        interleave=nodes is not None and bound.nodes is None,
        memlock_bytes=host_weights_bytes(plan) if plan.settings.mlock else None,
        oom_score_adj=OOM_SCORE_ADJ,
        group=group,
    )
