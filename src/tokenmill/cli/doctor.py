"""`tokenmill doctor`: what keeps this machine from serving as fast as it could, and what to type against it."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tokenmill.api.planning import locate
from tokenmill.cli.options import GoalOptions
from tokenmill.cli.output import Common, harmless, show, show_json, show_text
from tokenmill.config import Config
from tokenmill.doctor.check_result import CheckResult, Remedy, Severity
from tokenmill.doctor.examine import by_severity, examine
from tokenmill.doctor.facts import ModelNeeds
from tokenmill.doctor.gather import gather
from tokenmill.doctor.limits import core_finding, memory_finding, running_findings
from tokenmill.doctor.model import model_facts
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
    model: str | None = None,
    /,
    *,
    all: bool = False,
    options: GoalOptions = GoalOptions(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Look for what slows this machine down or will fail, and say what to change, with the exact command.

    Takes about a second and changes nothing. Exit code 0: no problem was found; 1: at least one was.

    Parameters
    ----------
    model:
        Also check what needs a model: whether its plan fits what is free now, how long it loads, how much of it is in
        memory. A file, a folder, or a name as for tokenmill plan; the options below are that command's.
    all:
        Also list what is fine and what could not be seen.
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
    """What running engines leave to others, and what those to come would."""
    wanted = options.reserving(config.reserve)
    found = [
        core_finding(wanted.reserve_cores or 0, config.engine, os.sched_getaffinity(0)),
        memory_finding(wanted.reserve_ram or 0),
    ]
    return [*(finding for finding in found if finding is not None), *running_findings(config.state_path)]


class CopyLine(str):
    """A line to copy: printed as it is, neither folded nor cut."""

    __slots__ = ()


def show_all(parts: Iterable[RenderableType]) -> None:
    """Print text folded to the terminal, and lines to copy as they are."""
    for part in parts:
        if isinstance(part, CopyLine):
            show_text(harmless(part))
        else:
            show(part)


def render(findings: Iterable[CheckResult], *, everything: bool = False) -> list[RenderableType]:
    """Problems and advice in full, the rest counted in one line or, on request, listed."""
    groups: dict[Severity, list[CheckResult]] = {severity: [] for severity in TITLES}
    for finding in findings:
        groups[finding.severity].append(finding)
    parts: list[RenderableType] = []
    for severity in IN_FULL:
        if groups[severity]:
            parts.append(Text(TITLES[severity], style=STYLES[severity]))
            parts += [part for finding in groups[severity] for part in _full(finding)]
    if not groups["problem"]:
        parts.append(Text("no problem found", style=STYLES["fine"]))
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
    return [*parts, Text(f"{counted} (--all lists them)", style="dim")]


def _full(finding: CheckResult) -> Iterator[RenderableType]:
    """One finding: what was seen, why it matters, the commands; commands are never folded."""
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
    """A command on lines that a shell reads as one: broken after a pipe where it is long."""
    lines = []
    for line in command.split("\n"):
        first, pipe, rest = line.partition(" | ")
        lines += [f"{first} |", f"  {rest}"] if pipe and len(line) > WIDTH - 6 else [line]
    return lines


def _one_line(finding: CheckResult) -> str:
    if finding.severity == "fine":
        return f"{finding.check}: {finding.seen}"
    why = f"; {finding.why}" if finding.why else ""
    ways = ", ".join(remedy.command for remedy in finding.remedies)
    return f"{finding.check}: {finding.seen}{why}" + (f": {ways}" if ways else "")


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
    """Where the models lie, and how to look at the one that is asked about."""
    if model is None:
        said = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
        if said:
            raise UsageError(f"--{said[0].replace('_', '-')} is for a model's plan", hint="name the model as well")
        return config.models_path, None
    found = locate(model, common.load_config())
    goal = options.reserving(config.reserve).goal_for("llama.cpp")
    measured = None if config.machine == catalog.THIS else catalog.find(config.machine).measured
    place = Path(found) if Path(found).exists() else config.models_path
    return place, lambda machine: model_facts(model, machine, read(found), goal, measured=measured)
