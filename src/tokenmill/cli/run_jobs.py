"""`tokenmill run`: a batch of jobs, from a file to a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console, RenderableType

from tokenmill.api.batches import BatchRequest, run_batch
from tokenmill.api.run_options import RunOptions
from tokenmill.api.sources import JobSource
from tokenmill.api.stores import store_address
from tokenmill.api.summary import Summary
from tokenmill.cli.options import BodyOptions, EngineFlags
from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.signals import SignalStop
from tokenmill.cli.views.run import document, nodes_table, summary
from tokenmill.errors import UsageError
from tokenmill.jobs.worker.retries import MOST_ATTEMPTS
from tokenmill.storage.lines import check_there
from tokenmill.units import number_of


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TableOptions:
    """Jobs that are made of a table's rows instead of read from a file."""

    table: Path | None = None
    """A table instead of a job file: JSONL, CSV, TSV or Parquet; every row becomes a job."""

    template: Path | None = None
    """The file of the prompt for each row: {column} is what stands there, {*} all other columns as lines."""

    system: Path | None = None
    """The file of a system message for each row, written in the same way."""

    layout: Literal["auto", "file"] = "auto"
    """auto orders the columns of {*} so that rows share the most; file leaves them as they are. Default: auto."""

    key: str | None = None
    """The column that names the jobs; default: they are row-1, row-2, ..."""

    def source(self, jobs: str | None) -> JobSource:
        """The jobs of the command; UsageError unless there is exactly one source of them."""
        if self.table is None:
            lonely = [name for name in ("template", "system", "key") if getattr(self, name) is not None]
            if lonely:
                raise UsageError(f"--{lonely[0]} is for a table", hint="give --table too, or a job file alone")
            if jobs is None:
                raise UsageError("no jobs are given", hint="tokenmill run jobs.jsonl --output results.jsonl")
            return JobSource(jobs)
        if jobs is not None:
            raise UsageError("there is a job file and a table", hint="give one of them")
        if self.template is None:
            raise UsageError("a table needs a --template", hint="a text with {column} in it, and {*} for the others")
        check_there(self.table)
        return JobSource(self.table, self.template, self.system, self.layout, self.key)


STDOUT = "/dev/stdout"


def run(
    jobs: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    output: Annotated[str, Parameter(name=("--output", "-o"), allow_leading_hyphen=True)],
    model: str | None = None,
    errors: str | None = None,
    strict: bool = False,
    no_reuse: bool = False,
    attempts: int = MOST_ATTEMPTS,
    job_timeout: float | None = None,
    deadline: str | None = None,
    priority: int | None = None,
    store: str | None = None,
    on: str | None = None,
    table: TableOptions = TableOptions(),
    body: BodyOptions = BodyOptions(),  # noqa: B008  frozen
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Work through a file of jobs and write an answer, or the reason why there is none, for every line.

    Each line is an OpenAI batch line, or just a body with messages or a prompt. Shared beginnings of prompts are
    computed once. Answers are on the disk before they count: after Ctrl-C, a crash or a power cut the same command goes
    on where it stopped, and an answer that exists is never computed again. Lines of the output are in the order of the
    jobs and are final as soon as they are there. Exit code 0: every line has its result or its error; 130: interrupted.

    An engine is started for the run and ends with it, unless one with the same model runs already (tokenmill serve
    --engine-only); --engine also takes the name of one, or a URL.

    Parameters
    ----------
    jobs:
        The job file: JSONL, also packed with gzip or zstd, or Parquet; - reads stdin.
    output:
        The file for the results; - writes them to stdout, and the summary to stderr.
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2, which is pulled
        when it is not here. With the URL of a server that has several: which of them.
    errors:
        A file of their own for lines without an answer; default: they are in the output.
    strict:
        Refuse the file if a single line is wrong; default: it becomes an error line, and the rest runs.
    no_reuse:
        Compute every line, also those that have an answer from before.
    attempts:
        How often a job is tried that fails for reasons that can pass; default: 3.
    job_timeout:
        Seconds that one attempt may take, for lines that do not say.
    deadline:
        When to give up what has not been started: 8h, 90m, 06:30, or a date with a time. Jobs that are due first go
        first. Given again, it is the new one, and what was given up for the old is taken up.
    priority:
        Of lines that do not say; higher goes first. Given again, it is the new one; default: 0.
    store:
        The folder of batches, or postgresql://...; default: store in the configuration, or batches in the state
        folder.
    on:
        A Ray cluster to work on, with one engine on each of its machines: ray (the one that runs here, else started
        here), HOST:6379, or ray://HOST:10001. The model must be on all of them.
    """
    if jobs is not None and jobs.startswith("--"):
        raise UsageError(f"unknown option {jobs}", hint="tokenmill run --help")
    request = BatchRequest(
        table.source(jobs),
        store_address(store, common.load_config()),
        RunOptions(
            output=_target(output, common),
            errors=errors,
            strict=strict,
            reuse=not no_reuse,
            attempts=attempts,
            job_timeout_s=job_timeout,
            deadline=deadline,
            priority=priority,
            defaults=body.defaults(),
        ),
        options,
        model,
        on,
    )
    if on is not None and common.config is not None:
        raise UsageError(
            "--config and --on contradict each other: every machine reads its own",
            hint="put it on the machines as ~/.config/tokenmill/tokenmill.toml; --store and others are options, too",
        )
    stop = SignalStop()
    with shown_progress() as on_progress:
        ended = run_batch(request, common.load_config(), stop, on_progress)
    _show(ended, common)
    return stop.code if ended.end == "stopped" else 0


def _target(output: str, common: Common) -> str:
    if output.startswith("--"):
        raise UsageError(f"--output needs a file, not {output}", hint="- is stdout")
    if output == "-" and common.json:
        raise UsageError("--json prints totals to stdout, so results cannot go there", hint="name a file as --output")
    return STDOUT if output == "-" else output


def _show(ended: Summary, common: Common) -> None:
    batch = ended.batch
    counts = ended.batch.counts
    parts = [*summary(ended), *nodes_table(ended.nodes)]
    if not ended.output_written:
        parts.append("the results are written by another process, on its machine: nothing was written here")
    if common.json:
        show_json(document(ended))
    elif batch.output == STDOUT:
        _show_on_stderr(parts)
    else:
        show(*parts)
    if not batch.finished:
        unread = ", and the job file is not stored completely" if batch.sealed_s is None else ""
        say(
            f"stopped: {counts.final:,} of {number_of(counts.total, 'job')} done and kept{unread}; "
            "run the same command again to continue"
        )


def _show_on_stderr(parts: Sequence[RenderableType]) -> None:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
