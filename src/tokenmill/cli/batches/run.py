"""`tokenmill run`: runs a batch of jobs from a file."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from rich.console import Console, RenderableType

from tokenmill.api import detached
from tokenmill.api.batch_forecast import forecast_run
from tokenmill.api.batches import run_batch, store_batch
from tokenmill.api.run_options import RunOptions
from tokenmill.api.run_request import BatchRequest
from tokenmill.api.sources import JobSource
from tokenmill.api.stores import store_address
from tokenmill.api.summary import Summary
from tokenmill.cli.options import BodyOptions, EngineFlags, Model
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.signals import SignalStop
from tokenmill.cli.views.run import document, nodes_table, summary
from tokenmill.cli.views.run_forecast import document as forecast_document
from tokenmill.cli.views.run_forecast import render
from tokenmill.errors import UsageError
from tokenmill.jobs.models import INVALID_LINE
from tokenmill.jobs.output_checks import STDOUT
from tokenmill.jobs.worker.retries import MAX_ATTEMPTS
from tokenmill.storage.lines import check_exists
from tokenmill.units import format_seconds, number_of


@Parameter(name="*", group=Group.create_ordered("Time and retries", sort_key=0))
@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run works, and how long it tries."""

    max_hours: Annotated[float | None, Parameter(metavar="HOURS")] = None
    """Stop after HOURS, loading included; the same command continues. [default: no limit]"""

    window: Annotated[str | None, Parameter(metavar="TIMES")] = None
    """Run only in these hours of the day, such as 22:00-06:00 in local time, until the batch is finished; the engine is
    stopped outside of them. [default: at any time]"""

    deadline: Annotated[str | None, Parameter(metavar="TIME")] = None
    """Cancel jobs that have not started by TIME, such as 8h, 90m, 06:30 or 2026-12-01T06:30; jobs with an earlier
    deadline run first. Repeat the command with another value to change it. [default: none]"""

    priority: Annotated[int | None, Parameter(metavar="N")] = None
    """Priority of jobs that do not set one; higher runs first. Repeat the command with another value to change it.
    [default: 0]"""

    attempts: Annotated[int, Parameter(metavar="N")] = MAX_ATTEMPTS
    """Maximum attempts for retryable failures."""

    job_timeout: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Time limit of one attempt, for jobs that do not set one. [default: no limit]"""


@Parameter(name="*", group=Group.create_ordered("Jobs from a table", sort_key=0))
@dataclass(frozen=True, slots=True)
class TableOptions:
    """Jobs made from the rows of a table instead of a job file."""

    table: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Make a job from every row of this table instead of reading JOBS: JSONL, CSV, TSV or Parquet."""

    template: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the prompt of a row: {column} is replaced by that column, {*} by all other columns, one per line."""

    system: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the system message of a row, with the same placeholders. [default: no system message]"""

    layout: Literal["auto", "file"] = "auto"
    """Order of the columns in {*}: auto orders them so that prompts share long prefixes, file keeps the table's
    order."""

    key: Annotated[str | None, Parameter(metavar="COLUMN")] = None
    """Column with the custom_id of each job. [default: row-1, row-2, ...]"""

    def source(self, jobs: str | None, limit: int | None) -> JobSource:
        """The source of the jobs, or of the first ones; UsageError unless exactly one is given."""
        if self.table is None:
            alone = next((name for name in ("template", "system", "key") if getattr(self, name) is not None), None)
            if alone is not None:
                raise UsageError(f"--{alone} requires --table", hint=f"add --table, or omit --{alone}")
            if jobs is None:
                raise UsageError("no jobs given", hint="tokenmill run jobs.jsonl --output results.jsonl")
            return JobSource(jobs, limit=limit)
        if jobs is not None:
            raise UsageError(f"a job file ({jobs}) and --table were both given", hint="use only one of them")
        if self.template is None:
            raise UsageError(
                "--table requires --template",
                hint="write the prompt to a file, with {column} for a column and {*} for all others",
            )
        check_exists(self.table)
        return JobSource(self.table, self.template, self.system, self.layout, self.key, limit)


def run(
    jobs: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    output: Annotated[str, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, metavar="FILE")],
    model: Model = None,
    errors: Annotated[str | None, Parameter(metavar="FILE")] = None,
    strict: bool = False,
    no_reuse: bool = False,
    fail_on_error: bool = False,
    limit: Annotated[int | None, Parameter(metavar="N")] = None,
    dry_run: bool = False,
    detach: bool = False,
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    on: Annotated[str | None, Parameter(metavar="CLUSTER")] = None,
    limits: RunLimits = RunLimits(),
    table: TableOptions = TableOptions(),
    body: BodyOptions = BodyOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Run a batch of jobs from a file.

    Writes one result or error per input line, in input order. Safe to interrupt: run the same command again and it
    resumes; finished answers are never recomputed. Prompts that share a prefix compute it once.

    Each line is an OpenAI batch line, or a request body with messages or a prompt. The command starts an engine and
    stops it at the end, unless `tokenmill serve --engine-only` already runs one with this model.

    Exit code 0: every line has a result or an error, or the file is empty; 1: the run failed, a time limit ended it, or
    no line could be run; 130: interrupted.

        tokenmill run jobs.jsonl -o results.jsonl -m kimi.gguf --context 16k
        tokenmill run jobs.jsonl -o results.jsonl -m kimi-k2.5:Q4_K_S --dry-run
        tokenmill run jobs.jsonl -o results.jsonl -m kimi.gguf --detach
        tokenmill run jobs.jsonl -o first.jsonl -m kimi.gguf --limit 10
        tokenmill run --table tickets.csv --template triage.txt -o out.jsonl

    Parameters
    ----------
    jobs:
        Job file: JSONL (also gzip or zstd) or Parquet; - reads stdin.
    output:
        Write results to FILE; - writes them to stdout and the summary to stderr.
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model; with the URL of a server, one of its models.
        [default: smollm2]
    errors:
        Write failed lines to FILE instead of the results file.
    strict:
        Refuse the whole file if a line is invalid, instead of writing an error for that line.
    no_reuse:
        Compute every line, even if the store already has an answer for it.
    fail_on_error:
        Exit with 1 if any line has an error instead of a result.
    limit:
        Run only the first N jobs, as a batch of their own; a run of the whole file reuses their answers.
    dry_run:
        Forecast tokens, time, energy and disk space; start and store nothing. The model need not be downloaded.
    detach:
        Store the batch, run it in the background and return; see tokenmill attach.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    on:
        Run on a Ray cluster, with one engine per machine: ray (use or start a local cluster), HOST:6379 or
        ray://HOST:10001. Every machine needs the model.
    """
    if jobs is not None and jobs.startswith("--"):
        raise UsageError(f"unknown option {jobs}", hint="tokenmill run --help")
    if on is not None and common.config is not None:
        raise UsageError(
            "--config cannot be combined with --on: every machine of the cluster reads its own configuration",
            hint="install the file as ~/.config/tokenmill/tokenmill.toml on every machine",
        )
    config = common.load_config()
    request = BatchRequest(
        table.source(jobs, limit),
        store_address(store, config),
        RunOptions(
            output=_target(output, common, detach=detach),
            errors=errors,
            strict=strict,
            reuse=not no_reuse,
            defaults=body.defaults(),
            attempts=limits.attempts,
            job_timeout_s=limits.job_timeout,
            max_hours=limits.max_hours,
            window=limits.window,
            deadline=limits.deadline,
            priority=limits.priority,
        ),
        options,
        model,
        on,
    )
    if dry_run:
        _show_forecast(request, common)
        return 0
    stop = SignalStop()
    with shown_progress() as on_progress:
        if detach:
            ended = store_batch(request, config, stop, on_progress)
        else:
            ended = run_batch(request, config, stop, on_progress)
    if detach and not ended.batch.finished:
        _run_in_background(ended.batch.name, common)
        return 0
    _show(ended, common)
    if ended.end == "stopped":
        return stop.code
    return _exit_code(ended, fail_on_error=fail_on_error)


def _show_forecast(request: BatchRequest, common: Common) -> None:
    config = common.load_config()
    with shown_progress() as on_progress:
        found = forecast_run(request, config, on_progress)
    if common.json:
        show_json(forecast_document(found, config.costs))
    else:
        show(*render(found, config.costs))


def _run_in_background(batch: str, common: Common) -> None:
    """Start this command again without --detach, as a process that outlives this one; its log is for people."""
    words = [word for word in sys.argv[1:] if word not in ("--detach", "--json")]
    command = [sys.executable, "-m", "tokenmill", *words]
    run = asyncio.run(detached.start(common.load_config().state_path, batch, command))
    if common.json:
        show_json({"batch": batch, "pid": run.process.pid, "log": run.log})
        return
    rows = {
        "batch": f"{batch} runs in the background, as process {run.process.pid}",
        "progress": f"tokenmill status {batch} --watch",
        "log": f"tokenmill attach {batch}",
        "stop": f"kill {run.process.pid}; the same command continues",
    }
    show(facts(rows))


def _exit_code(ended: Summary, *, fail_on_error: bool) -> int:
    """The exit code of a run that was not interrupted."""
    none_ran = ended.jobs > 0 and ended.failed_by_code.get(INVALID_LINE) == ended.jobs
    return int(ended.end == "hours" or none_ran or (fail_on_error and ended.failed > 0))


def _target(output: str, common: Common, *, detach: bool) -> str:
    if output.startswith("--"):
        raise UsageError(f"--output requires a file (got {output})", hint="use - for stdout")
    if output == "-" and common.json:
        raise UsageError("--json and --output - both write to stdout", hint="use a file for --output")
    if output == "-" and detach:
        raise UsageError("--detach has no stdout to write to", hint="use a file for --output")
    return STDOUT if output == "-" else output


def _show(ended: Summary, common: Common) -> None:
    batch = ended.batch
    counts = ended.batch.counts
    parts = [*summary(ended), *nodes_table(ended.nodes)]
    if not ended.output_written:
        parts.append("results are written by another process on its own host; none were written here")
    if common.json:
        show_json(document(ended))
    elif batch.output == STDOUT:
        _show_on_stderr(parts)
    else:
        show(*parts)
    if not batch.finished:
        unread = "; part of the job file was not read" if batch.sealed_s is None else ""
        left = f", about {format_seconds(left_s)} left" if (left_s := _left_s(ended)) is not None else ""
        say(
            f"stopped: {counts.final:,} of {number_of(counts.total, 'job')} done{left}{unread}; "
            "run the same command again to continue"
        )


def _left_s(ended: Summary) -> float | None:
    """Seconds for the remaining jobs at the pace of this run; None: unknown."""
    pace = ended.jobs_per_hour
    return None if not pace or ended.batch.sealed_s is None else 3600 * ended.pending / pace


def _show_on_stderr(parts: Sequence[RenderableType]) -> None:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
