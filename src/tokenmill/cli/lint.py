"""`tokenmill lint`: what will break the reuse of prompts, before the night is spent."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.options import EngineOptions
from tokenmill.api.planning import locate, plan_engine
from tokenmill.api.tokens import Tokeniser, tokeniser
from tokenmill.cli.output import Common, byte_progress, say, show, show_json
from tokenmill.cli.views.lint import document, render
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.ingest.job_file import open_jobs
from tokenmill.jobs.lint.fix import Choices, Survey
from tokenmill.jobs.lint.report import Report
from tokenmill.jobs.lint.run import Lint
from tokenmill.model.identity import identity_of
from tokenmill.model.read import read
from tokenmill.planner.speed.forecast import prefill_speed
from tokenmill.storage.atomic import new_file
from tokenmill.storage.lines import BadLine, Chunk, split
from tokenmill.tuner import history
from tokenmill.tuner.history import SpeedRecord


@dataclass(frozen=True, slots=True)
class LintModel:
    """What a model adds to a look at jobs."""

    context: int | None = None  # tokens that it was trained for
    prefill_tok_s: float | None = None  # measured here, or forecast
    speed: str | None = None  # the same in words, or why there is none


@dataclass(frozen=True, slots=True)
class Fixed:
    """What was rewritten."""

    output: str
    lines: int
    changed_lines: int
    tools_lines: int
    system_lines: int
    complete: bool


def lint(
    jobs: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    fix: bool = False,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    model: str | None = None,
    machine: str | None = None,
    context: int | None = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find what breaks the reuse of prompts in a file of jobs: dates, ids, blanks, key order, near twins and more.

    Each finding has the jobs it is in, both sides of an example and the tokens that it costs when every shared head
    could be computed once. Exit code 1: something costs more than 1 % of all prompt tokens, or lines cannot be run.

    Parameters
    ----------
    jobs:
        The job file: JSONL, also packed with gzip or zstd, or Parquet; - reads stdin.
    fix:
        Write the jobs with what can safely be made alike: the order of keys in tools that are otherwise the same, and
        line ends and blanks before them in system messages that are otherwise the same, each as most lines have it.
        Nothing else is touched.
    output:
        Where --fix writes to.
    model:
        A GGUF file or the name of a model: its vocabulary counts tokens, and its speed gives hours: as it was measured
        on this machine (tokenmill bench, tune), else as forecast.
    machine:
        The machine for the forecast: this, a name from tokenmill machines, or a machine file; default: the
        configuration's, else this.
    context:
        Tokens that a prompt and its answer may have together; default: what the model was trained for.
    force:
        Let --fix overwrite a file.
    """
    _check(jobs, fix=fix, output=output, machine=machine, model=model, context=context)
    known = (
        LintModel(speed="unknown, so no hours: --model says whose") if model is None else _model(model, machine, common)
    )
    with tokeniser(model, common.load_config()) as tokens:
        survey = Survey() if fix else None
        report = _look(jobs, tokens, context or known.context, survey)
        fixed = None
        before = report
        if survey is not None and output is not None:
            fixed = _fix(jobs, output, survey, force=force)
            report = _look(str(output), tokens, context or known.context, None)
    if common.json:
        show_json(document(report, known.prefill_tok_s) | _more(before, fixed, known))
    else:
        name = jobs if fixed is None else fixed.output
        show(
            *render(
                name,
                report,
                prefill_tok_s=known.prefill_tok_s,
                speed=known.speed,
                why_estimated=tokens.why_not,
                fixed=fixed is not None,
            )
        )
        if fixed is not None:
            _tell(fixed, before, report)
    return 0 if report.clean else 1


def _check(
    jobs: str, *, fix: bool, output: Path | None, machine: str | None, model: str | None, context: int | None
) -> None:
    if jobs.startswith("-") and jobs != "-":
        raise UsageError(f"unknown option: {jobs}", hint="tokenmill lint --help; a file of that name is ./" + jobs)
    if fix != (output is not None):
        raise UsageError("--fix and --output go together", hint="tokenmill lint jobs.jsonl --fix -o fixed.jsonl")
    if fix and jobs == "-":
        raise UsageError("--fix reads the jobs three times, and stdin comes once", hint="give the file's path")
    if output is not None and output.exists() and Path(jobs).exists() and output.samefile(jobs):
        raise UsageError("--fix does not overwrite the file it reads", hint="name another file")
    if machine is not None and model is None:
        raise UsageError("--machine is for a model's forecast", hint="give --model too")
    if context is not None and context < 1:
        raise UsageError(f"--context must be at least 1, not {context}", hint="tokens of a prompt and its answer")


def _model(name: str, machine: str | None, common: Common) -> LintModel:
    """What the model is and how fast it reads on the machine."""
    place = locate(name, common.load_config())
    config = common.load_config()
    profile = read(place)
    here = find(machine or config.machine)
    measured = _measured(place, here, config.state_path)
    if measured is not None and measured.figures.prefill_tok_s is not None:
        words = f"{measured.figures.prefill_tok_s:.3g} tok/s, measured {measured.when[:10]} with {measured.build}"
        return LintModel(profile.training_context, measured.figures.prefill_tok_s, words)
    plan = plan_engine(name, EngineOptions(machine=machine), config, files=False).plan
    if not plan.fits:
        why = f"no hours: {profile.name} does not fit {here.name} (tokenmill plan says why)"
        return LintModel(profile.training_context, speed=why)
    speed = prefill_speed(
        here, profile, plan.settings, plan.placement, depth=0, prompt=plan.settings.ubatch, calibration=plan.calibration
    )
    if speed is None:
        why = f"no hours: {here.name} states too little for a forecast (tokenmill probe --measure)"
        return LintModel(profile.training_context, speed=why)
    words = f"{speed.tok_s:.3g} tok/s, forecast ({speed.confidence}) for {profile.name} on {here.name}"
    return LintModel(profile.training_context, speed.tok_s, words)


def _measured(place: str, machine: Machine, state: Path) -> SpeedRecord | None:
    """The newest measurement of how fast a model reads on a machine; None: there is none."""
    found = [speed for speed in history.read(state, machine_id=machine_id(machine)) if speed.figures.prefill_tok_s]
    if not found or not Path(place).exists():  # a model's identity takes a look into its files
        return None
    model_id = identity_of(place)
    return next((speed for speed in reversed(found) if speed.model_id == model_id), None)


def _look(jobs: str, tokens: Tokeniser, context: int | None, survey: Survey | None) -> Report:
    """One pass over the file."""
    look = Lint(context=context, count=tokens.count)
    for item in _lines(jobs, "lint"):
        if isinstance(item, BadLine):
            look.bad(item)
        else:
            look.add(*item)
            if survey is not None:
                survey.add(*item)
    return look.report()


def _lines(jobs: str, what: str) -> Iterator[tuple[int, str] | BadLine]:
    for chunk in _chunks(jobs, what):
        yield from (chunk,) if isinstance(chunk, BadLine) else split(chunk)


def _chunks(jobs: str, what: str) -> Iterator[Chunk | BadLine]:
    """The file's chunks, with a bar that shows how far we are."""
    with open_jobs(jobs) as source, byte_progress() as progress:
        task = progress.add_task(what, total=None if jobs == "-" else Path(jobs).stat().st_size)
        for chunk in source.chunks():
            yield chunk
            progress.advance(task, 0 if isinstance(chunk, BadLine) else len(chunk.data))


def _fix(jobs: str, output: Path, survey: Survey, *, force: bool) -> Fixed:
    """Write the file again with the chosen spellings; every other byte of a line stays."""
    choices = survey.choices()
    if choices.wanted:
        for item in _lines(jobs, "read"):
            if not isinstance(item, BadLine):
                choices.learn(*item)
    counts = {"lines": 0, "changed": 0, "tools": 0, "system": 0}
    with new_file(output, force=force) as file:
        for chunk in _chunks(jobs, "write"):
            if isinstance(chunk, BadLine):
                raise UsageError(f"line {chunk.number} cannot be copied: {chunk.reason}", hint="take it out")
            file.write(b"\n".join(_rewritten(raw, choices, counts) for raw in chunk.data.split(b"\n")))
            if not chunk.data.endswith(b"\n"):  # a row of a table, or the last line of a file
                file.write(b"\n")
    return Fixed(str(output), counts["lines"], counts["changed"], counts["tools"], counts["system"], survey.complete)


def _rewritten(raw: bytes, choices: Choices, counts: dict[str, int]) -> bytes:
    counts["lines"] += bool(raw.strip())
    try:
        line = raw.decode()
    except UnicodeDecodeError:
        return raw
    text = line.strip(" \t\r")
    written, changes = choices.rewrite(text) if text else (text, set())
    counts["changed"] += bool(changes)
    for change in changes:
        counts[change] += 1
    return line.replace(text, written, 1).encode() if changes else raw


def _more(before: Report, fixed: Fixed | None, known: LintModel) -> dict[str, Any]:
    more: dict[str, Any] = {"prefill_tok_s": known.prefill_tok_s}
    if fixed is not None:
        more["fixed"] = {
            **{name: getattr(fixed, name) for name in Fixed.__slots__},
            "compute_tokens_before": before.tokens(before.compute_bytes),
        }
    return more


def _tell(fixed: Fixed, before: Report, after: Report) -> None:
    if not fixed.changed_lines:
        say(f"nothing was to be made alike: {fixed.output} has the same lines")
        return
    say(
        f"{fixed.output}: {fixed.changed_lines:,} of {fixed.lines:,} lines changed; key order of tools in "
        f"{fixed.tools_lines:,}, line ends of system messages in {fixed.system_lines:,}"
    )
    saved = before.tokens(before.compute_bytes - after.compute_bytes)
    say(f"{max(0, saved):,} tokens less to compute")
    if not fixed.complete:
        say("there were too many different heads to look at all: some were left as they are")
