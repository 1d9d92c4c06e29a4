"""The priority, scheduling, cores and memory nodes of an engine's process, from its plan and the configuration."""

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
    """What a plan and the configuration ask for. Priority is opt-in; cores that are reserved are left unless told not
    to; where memory goes is the plan's. The engine is always the first to be killed when memory runs out.

    `division`: of the cores of the machine that it will run on; default: as the plan's machine is described.
    """
    if config.scheduling not in get_args(Scheduling):
        raise UsageError(
            f"engine.scheduling: {config.scheduling!r} is not known", hint=f"one of {', '.join(get_args(Scheduling))}"
        )
    if config.nice is not None and not HIGHEST_NICE <= config.nice <= LOWEST_NICE:
        raise UsageError(f"engine.nice: {config.nice} is not between {HIGHEST_NICE} (first) and {LOWEST_NICE} (last)")
    bound = binding(plan)
    spread = tuple(node.index for node in plan.machine.numa if node.memory_bytes)
    nodes = bound.nodes or (spread if bound.interleave and len(spread) > 1 else None)
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
