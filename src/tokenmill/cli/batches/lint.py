"""`tokenmill lint`: finds differences between prompts that prevent the reuse of shared prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import locate, plan_engine
from tokenmill.api.tokens import TokenCounter, token_counter
from tokenmill.cli.options import Model, TokenCount
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
from tokenmill.units import format_tok_s


@dataclass(frozen=True, slots=True)
class LintModel:
    """The properties of a model that `lint` uses."""

    context: int | None = None  # training context, in tokens
    prefill_tok_s: float | None = None  # measured on this machine, or forecast
    speed: str | None = None  # description of prefill_tok_s, or why it is unknown


@dataclass(frozen=True, slots=True)
class Fixed:
    """The result of --fix."""

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
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
    model: Model = None,
    machine: Annotated[str | None, Parameter(metavar="NAME")] = None,
    context: Annotated[TokenCount | None, Parameter(alias="-c")] = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find differences that prevent prefix reuse in a job file, such as timestamps, ids, whitespace and key order.

    Each finding shows the affected jobs, both sides of an example, and the prompt tokens wasted because a prefix could
    not be shared. Exit code 0: no finding costs more than 1 % of all prompt tokens, and every line is valid; 1:
    otherwise.

        tokenmill lint jobs.jsonl --model kimi.gguf
        tokenmill lint jobs.jsonl --fix -o fixed.jsonl

    Parameters
    ----------
    jobs:
        Job file: JSONL (also gzip or zstd) or Parquet; - reads stdin.
    fix:
        Write the jobs to OUTPUT with safe corrections: tools and system messages that differ only in key order, line
        ends or trailing whitespace get the most common form.
    output:
        Write the result of --fix to FILE.
    model:
        GGUF file or name of a model, to count tokens with its vocabulary and to show costs as hours, at the speed
        measured on this machine or else forecast. [default: estimated, 4 bytes per token]
    machine:
        Machine for the forecast: this, a name from `tokenmill machines`, or a machine file. [default: from the
        configuration, or this]
    context:
        Maximum tokens of a prompt and its answer. [default: the model's training context]
    force:
        Let --fix overwrite an existing file.
    """
    _check(jobs, fix=fix, output=output, machine=machine, model=model, context=context)
    known = (
        LintModel(speed="no time estimate: add --model FILE.gguf") if model is None else _model(model, machine, common)
    )
    with token_counter(model, common.load_config()) as tokens:
        survey = Survey() if fix else None
        report = _scan(jobs, tokens, context or known.context, survey)
        fixed = None
        before = report
        if survey is not None and output is not None:
            fixed = _fix(jobs, output, survey, force=force)
            report = _scan(str(output), tokens, context or known.context, None)
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
            _report_fix(fixed, before, report)
    return 0 if report.clean else 1


def _check(
    jobs: str, *, fix: bool, output: Path | None, machine: str | None, model: str | None, context: int | None
) -> None:
    if jobs.startswith("-") and jobs != "-":
        raise UsageError(f"unknown option: {jobs}", hint=f"tokenmill lint --help; for a file of that name: ./{jobs}")
    if fix != (output is not None):
        raise UsageError("--fix and --output require each other", hint="tokenmill lint jobs.jsonl --fix -o fixed.jsonl")
    if fix and jobs == "-":
        raise UsageError("--fix cannot read stdin, because it reads the jobs three times", hint="use a file")
    if output is not None and output.exists() and Path(jobs).exists() and output.samefile(jobs):
        raise UsageError(f"--output {output} is the job file itself", hint="choose another output file")
    if machine is not None and model is None:
        raise UsageError("--machine requires --model", hint="add --model, or omit --machine")
    if context is not None and context < 1:
        raise UsageError(
            f"--context must be at least 1 (got {context})", hint="omit it to use the model's training context"
        )


def _model(name: str, machine: str | None, common: Common) -> LintModel:
    """The model's training context and its prefill speed on the machine, measured or else forecast."""
    place = locate(name, common.load_config())
    config = common.load_config()
    profile = read(place)
    here = find(machine or config.machine)
    measured = _measured(place, here, config.state_path)
    if measured is not None and measured.figures.prefill_tok_s is not None:
        words = (
            f"{format_tok_s(measured.figures.prefill_tok_s)} tok/s, measured {measured.when[:10]} with {measured.build}"
        )
        return LintModel(profile.training_context, measured.figures.prefill_tok_s, words)
    plan = plan_engine(name, EngineOptions(machine=machine), config, files=False).plan
    if not plan.fits:
        why = f"no time estimate: {profile.name} does not fit {here.name} (see tokenmill plan)"
        return LintModel(profile.training_context, speed=why)
    speed = prefill_speed(
        here, profile, plan.settings, plan.placement, depth=0, prompt=plan.settings.ubatch, calibration=plan.calibration
    )
    if speed is None:
        why = f"no time estimate: the bandwidths of {here.name} are unknown (tokenmill probe --measure)"
        return LintModel(profile.training_context, speed=why)
    words = f"{format_tok_s(speed.tok_s)} tok/s, forecast ({speed.confidence}) for {profile.name} on {here.name}"
    return LintModel(profile.training_context, speed.tok_s, words)


def _measured(place: str, machine: Machine, state: Path) -> SpeedRecord | None:
    """The newest measurement of a model's prefill speed on a machine, or None."""
    found = [speed for speed in history.read(state, machine_id=machine_id(machine)) if speed.figures.prefill_tok_s]
    if not found or not Path(place).exists():  # computing a model's identity reads its files
        return None
    model_id = identity_of(place)
    return next((speed for speed in reversed(found) if speed.model_id == model_id), None)


def _scan(jobs: str, tokens: TokenCounter, context: int | None, survey: Survey | None) -> Report:
    """One pass over the file."""
    scan = Lint(context=context, count=tokens.count)
    for item in _lines(jobs, "lint"):
        if isinstance(item, BadLine):
            scan.bad(item)
        else:
            scan.add(*item)
            if survey is not None:
                survey.add(*item)
    return scan.report()


def _lines(jobs: str, what: str) -> Iterator[tuple[int, str] | BadLine]:
    for chunk in _chunks(jobs, what):
        yield from (chunk,) if isinstance(chunk, BadLine) else split(chunk)


def _chunks(jobs: str, what: str) -> Iterator[Chunk | BadLine]:
    """The file's chunks, with a progress bar."""
    with open_jobs(jobs) as source, byte_progress() as progress:
        task = progress.add_task(what, total=None if jobs == "-" else Path(jobs).stat().st_size)
        for chunk in source.chunks():
            yield chunk
            progress.advance(task, 0 if isinstance(chunk, BadLine) else len(chunk.data))


def _fix(jobs: str, output: Path, survey: Survey, *, force: bool) -> Fixed:
    """Write the file with the chosen spellings; every other byte is kept."""
    choices = survey.choices()
    if choices.wanted:
        for item in _lines(jobs, "read"):
            if not isinstance(item, BadLine):
                choices.learn(*item)
    counts = {"lines": 0, "changed": 0, "tools": 0, "system": 0}
    with new_file(output, force=force) as file:
        for chunk in _chunks(jobs, "write"):
            if isinstance(chunk, BadLine):
                raise UsageError(f"line {chunk.number} cannot be copied: {chunk.reason}", hint="remove the line")
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


def _report_fix(fixed: Fixed, before: Report, after: Report) -> None:
    if not fixed.changed_lines:
        say(f"nothing to correct: {fixed.output} has the same lines")
        return
    say(
        f"{fixed.output}: {fixed.changed_lines:,} of {fixed.lines:,} lines changed; key order of tools in "
        f"{fixed.tools_lines:,}, line ends of system messages in {fixed.system_lines:,}"
    )
    saved = before.tokens(before.compute_bytes - after.compute_bytes)
    say(f"saves {max(0, saved):,} prompt tokens")
    if not fixed.complete:
        say("warning: the file has too many different prefixes to compare all; some were not corrected")
