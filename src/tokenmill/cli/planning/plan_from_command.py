"""`tokenmill plan --from-command`: plans an existing command line and lists its mistakes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.text import Text

from tokenmill.api.options import ENGINES
from tokenmill.api.planning.command_plan import plan_command
from tokenmill.cli.options import GoalOptions
from tokenmill.cli.output import Common, jsonable, show, show_json
from tokenmill.cli.views.plan import document, explained, render, render_versions, version_document
from tokenmill.errors import DoesNotFit, UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.launch.tensor_patterns import tiers_by_pattern
from tokenmill.planner.goal import DialectName

SEVERITY = {"error": "bold red", "warning": "yellow"}


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """Options of `--from-command` that do not belong to the plan."""

    binary: str | None
    explain: bool
    common: Common


def show_command_plan(
    text: str, model: str | None, machine: Machine, options: GoalOptions, command: ShownCommand
) -> int:
    """Show the plan of a command line and its mistakes. Exit code 1: the engine would refuse the command."""
    dialect = None if options.engine is None else server_dialect(options.engine)
    found = plan_command(_command_text(text), model, machine, options, dialect, binary=command.binary)
    made = found.plan
    if command.common.json:
        body = document(made, tiers_by_pattern(made.placement, made.profile), None)
        versions = [version_document(version) for version in found.versions]
        more = {"findings": jsonable(found.findings), "unknown_flags": jsonable(found.unknown_flags)}
        show_json(body | more | {"versions": versions})
    else:
        if found.versions:
            show(*render_versions(found.versions), Text())
        show(*render(made), *(explained(made) if command.explain else ()), Text())
        for finding in found.findings:
            show(Text(f"{finding.severity}: {finding.text}", style=SEVERITY.get(finding.severity, "")))
            if finding.hint:
                show(Text(f"  hint: {finding.hint}"))
        if not found.findings:
            show(Text("no mistakes found in the command"))
    if found.fails:
        return 1
    return 0 if made.fits else DoesNotFit.exit_code


def _command_text(given: str) -> str:
    """The command: the text itself, or that of a file or of the standard input (`-`)."""
    if given == "-":
        return sys.stdin.read()
    path = Path(given.removeprefix("@"))
    try:
        return path.read_text(encoding="utf-8") if given.startswith("@") or path.is_file() else given
    except (OSError, ValueError) as error:
        if not given.startswith("@"):
            return given  # a long command is no file name
        raise UsageError(f"--from-command: cannot read {path}: {error}") from error


def server_dialect(engine: str | None) -> DialectName:
    """The dialect of an engine on several hosts; without an engine, llama.cpp's, because the native engine uses one."""
    if engine is None:
        return "llama.cpp"
    return ENGINES.get(engine) or cast(DialectName, engine)
