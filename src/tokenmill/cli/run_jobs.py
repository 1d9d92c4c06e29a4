"""`tokenmill run`: a batch of jobs, from a file to a file."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, RenderableType

from tokenmill.cli.engine_for import Choice, choose, engine_up, plan_for
from tokenmill.cli.job_options import BodyOptions, folder_beside, moment_s, store_at, when
from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.cli.plan_view import render
from tokenmill.cli.run_on import OnRay, on_ray
from tokenmill.cli.run_table import TableOptions
from tokenmill.cli.run_view import Ended, document, jobs_at_first, progress_shown, summary
from tokenmill.cli.shaping import shape_at, width_for
from tokenmill.cli.starting import KINDS, EngineOptions, Wanted
from tokenmill.cli.stopping import Stop
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.jobs.apart import set_apart
from tokenmill.jobs.job import Batch, Submission
from tokenmill.jobs.keys import HIGHEST_PRIORITY
from tokenmill.jobs.leased_out import announce
from tokenmill.jobs.output import Output
from tokenmill.jobs.portion import Means
from tokenmill.jobs.progress import Report
from tokenmill.jobs.reschedule import Rescheduled
from tokenmill.jobs.retries import MOST_ATTEMPTS
from tokenmill.jobs.store import Store
from tokenmill.jobs.submit import Submitted, submit
from tokenmill.jobs.target import check_paths, check_unused
from tokenmill.jobs.worker import Options, work
from tokenmill.plan.plan import Plan
from tokenmill.units import number_of

DOES_NOT_FIT = 3
STDOUT = "/dev/stdout"
_MANY_LINES = 100_000  # from here on it is said how far a file is read


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
    table: TableOptions = TableOptions(),  # noqa: B008  frozen
    body: BodyOptions = BodyOptions(),  # noqa: B008  frozen
    options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
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
    if attempts < 1:
        raise UsageError(f"--attempts must be at least 1, not {attempts}")
    if job_timeout is not None and job_timeout <= 0:
        raise UsageError("--job-timeout must be more than 0 seconds")
    if priority is not None and abs(priority) > HIGHEST_PRIORITY:
        raise UsageError(f"--priority must be from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, not {priority}")
    how = Submission(
        "", output=_target(output, common), errors=_absolute(errors), priority=priority, strict=strict,
        reuse=not no_reuse, deadline_s=None if deadline is None else moment_s(deadline, time.time()),
        defaults=body.defaults(),
    )  # fmt: skip
    check_paths(how)
    table.check(jobs)
    address = store_at(store, common)
    settings = Options(attempts=attempts, job_timeout_s=job_timeout, count_least=True)
    began_s = time.monotonic()
    with ExitStack() as stack:
        ray = None if on is None else stack.enter_context(on_ray(on, address, model, options, common))
        choice = choose(model, options, common) if ray is None else ray.choice
        own = ray is None and choice.record is None and choice.url is None
        if own:
            options.goal_for(KINDS[choice.config.kind])  # refuses what cannot be, before anything is stored
        how = replace(how, model_id=choice.model_id)
        opened = stack.enter_context(Store(address))
        if deadline is not None:  # by the clock that all hosts of a store go by
            how = replace(how, deadline_s=moment_s(deadline, opened.now_s()))
        folder = stack.enter_context(folder_beside(address, common))
        called = None if table.table is None else str(table.table)
        plans = _Plans(choice, options, common) if own else None
        try:
            with table.opened(jobs, folder) as source:
                batch = _submitted(opened, source, how, called, plans).batch
            wanted = plans.made() if plans is not None and not batch.finished else None
        except _NoEngine as refused:
            return refused.told()
        results = stack.enter_context(Output(opened, batch)) if opened.claim_output(batch.id) else None
        report, load_s, code = None, None, 0
        if results is None:
            say(f"another runner writes the output of {batch.name}; this one works along")
        if not batch.finished:
            room = wanted.plan.settings.context if wanted is not None else None
            announce(opened, Means(batch.model_id, room, (batch.id,)))  # for loading takes a while
            measure = wanted is not None and options.sequences is None and not wanted.tuned
            report, load_s, code = asyncio.run(
                _work(opened, batch, results, choice, wanted, settings, folder, measure=measure)
                if ray is None
                else ray.work(opened, batch, results, settings)
            )
        batch = opened.batch(batch.id)
        written = _write_out(opened, batch, results) if batch.finished else results is not None
        ended = Ended(batch, report, load_s, time.monotonic() - began_s, opened.failures_by_code(batch.id))
    _tell(ended, common, ray, written=written)
    return code


class _NoEngine(UsageError):
    """There can be no engine for a batch."""

    def __init__(self, why: TokenmillError | Plan) -> None:
        super().__init__("there can be no engine for this batch")
        self._why = why

    def told(self) -> int:
        """Show why, and the exit code; what is wrong otherwise is raised."""
        if isinstance(self._why, TokenmillError):
            raise self._why
        show(*render(self._why))
        return DOES_NOT_FIT


class _Plans:
    """The plan for an engine of its own.

    It is made before a new batch is stored: from then on other runners may be at work on it.
    """

    def __init__(self, choice: Choice, options: EngineOptions, common: Common) -> None:
        self._choice, self._options, self._common = choice, options, common
        self._made: Wanted | None = None

    def made(self) -> Wanted:
        """The plan; _NoEngine where there is none."""
        if self._made is None:
            try:
                self._made = plan_for(self._choice, self._options, self._common)
            except TokenmillError as error:
                raise _NoEngine(error) from error
        if not self._made.plan.fits:
            raise _NoEngine(self._made.plan)
        return self._made


async def _work(
    store: Store,
    batch: Batch,
    output: Output | None,
    choice: Choice,
    wanted: Wanted | None,
    settings: Options,
    folder: Path,
    *,
    measure: bool,
) -> tuple[Report | None, float | None, int]:
    """Bring the engine up and work; what came of it, how long loading took, and the exit code."""
    stop, began_s = Stop(), asyncio.get_running_loop().time()
    try:
        async with engine_up(choice, wanted, folder) as engine:
            load_s = asyncio.get_running_loop().time() - began_s
            width = await width_for(engine, store, batch) if measure else None
            if wanted is not None and (done := await set_apart(engine, store, batch)) is not None:
                say(done)
            shape = await shape_at(engine, width)
            stop.loaded()
            with progress_shown() as tell:
                report = await work(
                    store, [batch], engine, shape, outputs={batch.id: output} if output is not None else None,
                    options=settings, stop=stop.event, tell=tell, portion=store.portion(shape.width),
                )  # fmt: skip
    except asyncio.CancelledError:
        if not stop.code:
            raise
        return None, None, stop.code
    return report, load_s if wanted is not None else None, stop.code if report.end == "stopped" else 0


def _write_out(store: Store, batch: Batch, output: Output | None) -> bool:
    """All of it, unless another runner still does; whether it was written here."""
    if output is not None:
        output.finish()
    elif store.claim_output(batch.id):
        with Output(store, batch) as late:
            late.finish()
    else:
        return False
    return True


def _target(output: str, common: Common) -> str:
    if output.startswith("--"):
        raise UsageError(f"--output needs a file, not {output}", hint="- is stdout")
    if output != "-":
        return os.path.abspath(output)  # noqa: PTH100  Path.resolve would follow links, which may change
    if common.json:
        raise UsageError("--json prints totals to stdout, so results cannot go there", hint="name a file as --output")
    return STDOUT


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)  # noqa: PTH100  as above


def _submitted(store: Store, source: str, how: Submission, called: str | None, plans: _Plans | None) -> Submitted:
    """The batch of a file, read into the store as far as it is not there yet; a new one only if it can be worked."""
    said = 0

    def progress(lines: int) -> None:
        nonlocal said
        if lines - said >= _MANY_LINES:
            said = lines
            say(f"{lines:,} lines are read")

    def fresh() -> None:
        check_unused(how)
        if plans is not None:
            plans.made()

    found = submit(store, source, how, progress=progress, fresh=fresh, called=called, tell=say)
    _say_submitted(found)
    return found


def _say_submitted(found: Submitted) -> None:
    batch, counts = found.batch, found.batch.counts
    again = "goes on" if found.continued and not batch.finished else "is done" if batch.finished else "begins"
    if counts.total == 0:
        say(f"{batch.source} holds no jobs\nhint: every line is a job; tokenmill run --help says what one looks like")
    elif batch.cancelled_s is not None:
        say(f"{batch.name} was cancelled; tokenmill retry {batch.name} --cancelled takes it up again")
    else:
        say(f"{batch.name} {again}: {jobs_at_first(counts)}")
    if found.changed is not None and not batch.finished:
        say(_changed(found.changed))


def _changed(what: Rescheduled) -> str:
    parts = []
    if what.deadline and what.batch.deadline_s is not None:
        revived = f"; {number_of(what.revived, 'job')} given up before taken up again" if what.revived else ""
        parts.append(f"deadline {when(what.batch.deadline_s)} from now on{revived}")
    if what.priority:
        parts.append(f"priority {what.batch.priority} from now on")
    return "; ".join(parts)


def _tell(ended: Ended, common: Common, ray: OnRay | None, *, written: bool) -> None:
    batch, counts = ended.batch, ended.batch.counts
    parts = [*summary(ended), *(() if ray is None else ray.table())]
    if not written:
        parts.append("the results are written by another runner, on its host: nothing was written here")
    if common.json:
        show_json(document(ended) | {"output_written": written} | ({} if ray is None else ray.document()))
    elif batch.output == STDOUT:
        _show_beside(parts)
    else:
        show(*parts)
    if not batch.finished:
        say(
            f"stopped: {counts.final:,} of {number_of(counts.total, 'job')} done and kept; "
            "the same command goes on from there"
        )


def _show_beside(parts: Sequence[RenderableType]) -> None:
    """On stderr what is otherwise data."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
