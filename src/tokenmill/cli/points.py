"""The operating point of `tokenmill tune`, picked up by the commands that plan."""

from pathlib import Path

from tokenmill.cli.output import say
from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.plan.goal import Goal
from tokenmill.tune.overlay import Overlaid, overlay
from tokenmill.tune.remember import find, has_points


def laid_over(
    goal: Goal, machine: Machine, profile: Profile, model_path: Path, config: EngineConfig, state: Path
) -> Overlaid:
    """A goal with what was found by tuning, where that holds; else the goal itself, perhaps with the reason."""
    if not has_points(state) or not model_path.exists():
        return Overlaid(goal)  # nobody has tuned here: nothing is to be looked up
    from tokenmill.tune.here import place_here  # noqa: PLC0415  engines, which a plan alone does not need

    place = place_here(machine, profile.name, model_path, config)
    if place is None:
        return Overlaid(goal)
    found = find(state, place)
    if found.point is None:
        return Overlaid(goal, why_not=found.why_not)
    cores, allowed = machine.cpu.cores, machine.limits.cgroup_cpus
    return overlay(goal, found.point, cores=cores if cores is None or allowed is None else min(cores, int(allowed)))


def say_point(laid: Overlaid, *, fits: bool) -> None:
    """Tell that a point is in force, or why the one that is there is not."""
    if laid.words is not None and not fits:
        say("the operating point does not fit any more: planned without it; tokenmill tune finds another")
    elif laid.words is not None:
        say(laid.words)
    elif laid.why_not is not None:
        say(f"{laid.why_not}: planned without it")
