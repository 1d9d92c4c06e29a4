"""`tokenmill doctor`: checks this machine for problems and prints the commands that fix them."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.loadable import usable_goal
from tokenmill.api.planning.plan import locate
from tokenmill.cli.options import GoalOptions, ModelArgument
from tokenmill.cli.output import Common, harmless, show, show_json, show_text
from tokenmill.config import Config
from tokenmill.doctor.check_result import CheckResult, Remedy, Severity
from tokenmill.doctor.examine import by_severity, examine
from tokenmill.doctor.facts import ModelNeeds
from tokenmill.doctor.gather import gather
from tokenmill.doctor.model import model_facts
from tokenmill.doctor.reserves import core_finding, memory_finding, running_findings
from tokenmill.errors import UsageError
from tokenmill.hardware import catalog
from tokenmill.hardware.machine import Machine
from tokenmill.model.read import read

WIDTH = 80
STYLES: dict[Severity, str] = {"problem": "bold red", "advice": "yellow", "unknown": "dim", "fine": "green"}
TITLES: dict[Severity, str] = {"problem": "problems", "advice": "advice", "unknown": "unknown", "fine": "fine"}
IN_FULL: tuple[Severity, ...] = ("problem", "advice")
ON_REQUEST: tuple[Severity, ...] = ("unknown", "fine")


def doctor(
    model: ModelArgument = None,
    *,
    all: bool = False,
    options: GoalOptions = GoalOptions(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Check this machine for problems and show the exact command that fixes each one.

    Takes about a second and changes nothing. Exit code 0: no problems; 1: at least one problem.

        tokenmill doctor
        tokenmill doctor kimi.gguf --context 32k

    Parameters
    ----------
    model:
        Also check this model (a file, folder or name, as for `tokenmill plan`): whether its plan fits the free memory,
        how long it takes to load, and how much of it is in the page cache.
    all:
        Also list checks that passed and checks that could not run.
    """
    config = common.load_config()
    place, read_model = _model(model, options, config, common)
    findings = by_severity((*examine(gather(config=config, path=place, model=read_model)), *_reserves(options, config)))
    if common.json:
        show_json(
            {
                "findings": [_document(finding) for finding in findings],
                "counts": dict(Counter(finding.severity for finding in findings)),
            }
        )
    else:
        show_all(render(findings, everything=all))
    return 1 if any(finding.severity == "problem" for finding in findings) else 0


def _reserves(options: GoalOptions, config: Config) -> list[CheckResult]:
    """The reserves that running engines keep and that new ones would keep."""
    wanted = options.reserving(config.reserve)
    found = [
        core_finding(wanted.reserve_cores or 0, config.engine, os.sched_getaffinity(0)),
        memory_finding(wanted.reserve_ram or 0),
    ]
    return [*(finding for finding in found if finding is not None), *running_findings(config.state_path)]


class CopyLine(str):
    """A line to copy: printed without wrapping or truncation."""

    __slots__ = ()


def show_all(parts: Iterable[RenderableType]) -> None:
    """Print text wrapped to the terminal, and lines to copy unwrapped."""
    for part in parts:
        if isinstance(part, CopyLine):
            show_text(harmless(part))
        else:
            show(part)


def render(findings: Iterable[CheckResult], *, everything: bool = False) -> list[RenderableType]:
    """Problems and advice in full; other findings are counted, or listed on request."""
    groups: dict[Severity, list[CheckResult]] = {severity: [] for severity in TITLES}
    for finding in findings:
        groups[finding.severity].append(finding)
    parts: list[RenderableType] = []
    for severity in IN_FULL:
        if groups[severity]:
            parts.append(Text(TITLES[severity], style=STYLES[severity]))
            parts += [part for finding in groups[severity] for part in _full(finding)]
    if not groups["problem"]:
        parts.append(Text("no problems found", style=STYLES["fine"]))
        parts += [Text()] if everything else []
    if everything:
        for severity in ON_REQUEST:
            if groups[severity]:
                parts.append(Text(TITLES[severity], style=STYLES[severity]))
                parts += [Padding(Text(_one_line(finding)), (0, 0, 0, 2)) for finding in groups[severity]]
                parts.append(Text())
        return parts[:-1]
    fine = len(groups["fine"])
    unknown = len(groups["unknown"])
    counted = f"{fine} check{'' if fine == 1 else 's'} fine, {unknown} unknown"
    return [*parts, Text(f"{counted} (use --all to list them)", style="dim")]


def _full(finding: CheckResult) -> Iterator[RenderableType]:
    """One finding: the observation, why it matters, and the commands, which are never wrapped."""
    yield Padding(Text.assemble((f"{finding.check}: ", "bold"), finding.seen), (0, 0, 0, 2))
    if finding.why:
        source = f" ({finding.source})" if finding.source else ""
        yield Padding(Text(f"{finding.why}{source}"), (0, 0, 0, 4))
    for remedy in finding.remedies:
        yield from _remedy(remedy)
    yield Text()


def _remedy(remedy: Remedy) -> Iterator[RenderableType]:
    note = f" ({remedy.note})" if remedy.note else ""
    if remedy.when == "by hand":
        yield Padding(Text(f"by hand: {remedy.command}{note}"), (0, 0, 0, 4))
        return
    yield Padding(Text(f"{remedy.when}{note}:", style="dim"), (0, 0, 0, 4))
    for line in _lines(remedy.command):
        yield CopyLine(f"      {line}")


def _lines(command: str) -> list[str]:
    """A command as lines that a shell accepts; long ones are broken after a pipe."""
    lines = []
    for line in command.split("\n"):
        first, pipe, rest = line.partition(" | ")
        lines += [f"{first} |", f"  {rest}"] if pipe and len(line) > WIDTH - 6 else [line]
    return lines


def _one_line(finding: CheckResult) -> str:
    if finding.severity == "fine":
        return f"{finding.check}: {finding.seen}"
    why = f"; {finding.why}" if finding.why else ""
    commands = ", ".join(remedy.command for remedy in finding.remedies)
    return f"{finding.check}: {finding.seen}{why}" + (f": {commands}" if commands else "")


def _document(finding: CheckResult) -> dict[str, object]:
    return {
        "check": finding.check,
        "severity": finding.severity,
        "seen": finding.seen,
        "why": finding.why,
        "source": finding.source,
        "remedies": [
            {"when": remedy.when, "command": remedy.command, "root": remedy.root, "note": remedy.note}
            for remedy in finding.remedies
        ],
    }


def _model(
    model: str | None, options: GoalOptions, config: Config, common: Common
) -> tuple[Path, Callable[[Machine], ModelNeeds] | None]:
    """The models folder and, if a model was given, its plan."""
    if model is None:
        given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} requires MODEL", hint="name the model as well")
        return config.models_path, None
    found = locate(model, common.load_config())
    goal = options.reserving(config.reserve).goal_for("llama.cpp")
    measured = None if config.machine == catalog.THIS else catalog.find(config.machine).measured
    place = Path(found) if Path(found).exists() else config.models_path
    engine = EngineOptions().engine_config(config)

    def facts(machine: Machine) -> ModelNeeds:
        usable, _ = usable_goal(machine, goal, engine)
        return model_facts(model, machine, read(found), usable, measured=measured)

    return place, facts
