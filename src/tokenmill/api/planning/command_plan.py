"""Plans an existing engine command line: its memory, predicted speed and problems."""

from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.api.options import PlanOptions
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.launch import Finding, findings_for, free_of, read_command, to_placement
from tokenmill.launch.parse.parsed import ReadCommand
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


def plan_command(
    text: str, model: str | None, machine: Machine, options: PlanOptions, dialect: DialectName | None = None
) -> CommandPlan:
    """Plan a command as its engine would run it.

    `model`: replaces the command's. `dialect`: default: recognized from the command. `options`: only reserves and
    margins may be set. UsageError where no model is known.
    """
    found = read_command(text, dialect)
    goal = options.for_command(found.goal)
    profile = read(_source(found, model))
    findings = findings_for(found, machine, profile)
    placement = None
    if goal.context is None and not goal.own_fit:
        goal = replace(goal, context=profile.training_context)  # the default of the engines
    if not goal.own_fit:
        free = free_of(found, machine)
        placement = to_placement(found, profile, len(machine.gpus), free_bytes=free, host=host_tier(machine))
    elif not goal.engine.startswith("ik_llama"):
        goal = replace(goal, own_fit=False)
        text = "this engine places layers by its own rule, which is unknown; tokenmill's placement is shown instead"
        findings = (*findings, Finding("note", text, None))
    elif goal.engine == "ik_llama":
        text = "planned for the current ik_llama.cpp; builds of spring 2026 have another --fit"
        hint = "use --engine ik_llama-2026-03 or ik_llama-2026-04 for such a build"
        findings = (*findings, Finding("note", text, hint))
    return CommandPlan(make(machine, profile, goal, placement=placement), findings, found.unknown)


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
