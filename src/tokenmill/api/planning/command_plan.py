"""Plans an existing engine command line: its memory, predicted speed and problems."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.api.options import PlanOptions
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.launch import Finding, findings_for, flags_of, free_of, possible_versions, read_command, to_placement
from tokenmill.launch.parse.parsed import ReadCommand
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.goal import DialectName
from tokenmill.planner.make import make
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """A command's plan and the findings about it."""

    plan: Plan
    findings: tuple[Finding, ...]
    unknown_flags: tuple[str, ...]
    versions: tuple[Plan, ...] = ()  # one plan per version that may be meant, if they do not agree on what fits

    @property
    def fails(self) -> bool:
        """Whether the engine would refuse the command."""
        return any(finding.severity == "error" for finding in self.findings)


def plan_command(
    text: str,
    model: str | None,
    machine: Machine,
    options: PlanOptions,
    dialect: DialectName | None = None,
    *,
    binary: str | None = None,
) -> CommandPlan:
    """Plan a command as its engine would run it.

    `model`: replaces the command's. `dialect`: default: recognized from the command. `binary`: the engine's program,
    which is asked for its flags. `options`: only reserves and margins may be set. UsageError where no model is known.
    """
    found = read_command(text, dialect)
    profile = read(_source(found, model))
    versions: Sequence[DialectName] = (found.engine,)
    if dialect is None:
        versions = possible_versions(found, None if binary is None else flags_of(binary))
        if found.engine not in versions:
            found = read_command(text, versions[0])
    made, placed = _planned(found, machine, profile, options)
    findings = (*findings_for(found, machine, profile), *placed)
    others = [read_command(text, version) for version in versions if version != found.engine]
    plans = (made, *(_planned(other, machine, profile, options)[0] for other in others))
    agree = len({_verdict(plan) for plan in plans}) == 1
    return CommandPlan(made, findings, found.unknown, () if agree else plans)


def _planned(
    found: ReadCommand, machine: Machine, profile: Profile, options: PlanOptions
) -> tuple[Plan, tuple[Finding, ...]]:
    """The plan of a command, and a note if its engine would place the layers otherwise."""
    goal = options.for_command(found.goal)
    placement = None
    notes: tuple[Finding, ...] = ()
    if goal.context is None and not goal.own_fit:
        goal = replace(goal, context=profile.training_context)  # the default of the engines
    if not goal.own_fit:
        free = free_of(found, machine)
        placement = to_placement(found, profile, len(machine.gpus), free_bytes=free, host=host_tier(machine))
    elif not goal.engine.startswith("ik_llama"):
        goal = replace(goal, own_fit=False)
        text = "this engine places layers by its own rule, which is unknown; tokenmill's placement is shown instead"
        notes = (Finding("note", text, None),)
    return make(machine, profile, goal, placement=placement), notes


def _verdict(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What does not fit, and when."""
    return tuple((lack.tier, lack.moment) for lack in plan.shortfalls)


def _source(found: ReadCommand, model: str | None) -> str:
    source = model or found.model
    if source is None:
        raise UsageError("the command has no model", hint="add it: tokenmill plan MODEL --from-command '...'")
    if model is None and not Path(source).exists():
        raise UsageError(
            f"the command's model file does not exist: {source}",
            hint="give a catalogue model instead: tokenmill plan kimi-k2.5:Q4_X --from-command '...'",
        )
    return source
