"""Checks of a plan before an engine is started from it: the machine is this one, the weights and the GPUs are usable.

`plan_engine` calls them for every command that loads a model.
"""

from dataclasses import replace

from tokenmill.api.progress import log
from tokenmill.config import EngineConfig
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import THIS, find, names
from tokenmill.hardware.identity import differences
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.native.builds.gpu_support import UnusedGpus, unused_gpus
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Decision, Plan


def require_here(machine: Machine, named: str) -> None:
    """UsageError if a machine that was asked for is not the one that this process runs on."""
    if named == THIS:
        return
    found = differences(machine, find(THIS))
    if found:
        raise UsageError(
            f"{machine.name} is not this machine: {'; '.join(found)}",
            hint="leave out --machine to load the model here; tokenmill plan plans for other machines",
            code="other_machine",
        )


def has_this_library(machine: Machine, named: str) -> bool:
    """Whether a plan is for the library installed here: for this machine, or a machine file that describes it.

    Other machines are assumed to have a library for their GPUs.
    """
    if named == THIS:
        return True
    return bool(machine.gpus) and named not in names() and not differences(machine, find(THIS))


def require_weights(profile: Profile, model: str) -> None:
    """UsageError for a header without weights."""
    if profile.ghost:
        raise UsageError(
            f"{model} is a header without weights, for planning only",
            hint="use the model's real file; tokenmill models pull hf:OWNER/REPO:QUANT downloads one",
            code="model_without_weights",
        )


def usable_goal(machine: Machine, goal: Goal, engine: EngineConfig) -> tuple[Goal, UnusedGpus | None]:
    """The goal without the GPUs that the engine's library cannot use; UsageError if it asks for them by number."""
    unused = None if goal.cpu_only else unused_gpus(machine, engine)
    if unused is None:
        return goal, None
    if goal.gpus:
        raise UsageError(unused.seen, hint=unused.remedy, code="gpu_not_supported")
    return replace(goal, gpus=()), unused


def warned(plan: Plan, unused: UnusedGpus | None, *, started: bool) -> Plan:
    """The plan with a warning about unused GPUs, which is also logged if an engine will be started from it."""
    if unused is None:
        return plan
    text = f"{unused.seen}; everything runs on the CPU. {unused.remedy[0].upper()}{unused.remedy[1:]}"
    if started:
        log.warning(text)
    decision = Decision("gpus", "none", unused.seen)
    return replace(plan, warnings=(text, *plan.warnings), decisions=(*plan.decisions, decision))
