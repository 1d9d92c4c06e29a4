"""Durable batches: `run` and `submit`; `work` is in `workers.py`.

A run asks the store whether the batch exists, plans the engine, stores the jobs, starts the engine and works until
every job has a result. The same call after a crash finds the same batch and continues it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from tokenmill.api.display import display
from tokenmill.api.engines.batch import BatchEngine, EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.engines.cluster import ClusterRun, open_cluster
from tokenmill.api.options import EngineOptions, engine_options
from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import OnProgress, ignore, log
from tokenmill.api.run_options import RunArguments, RunOptions, SubmitArguments, check_arguments, run_options
from tokenmill.api.sources import JobSource
from tokenmill.api.stopping import Stop, in_thread
from tokenmill.api.stores import store_address, work_folder
from tokenmill.api.summary import Summary
from tokenmill.api.tokens import token_counter
from tokenmill.config import Config
from tokenmill.jobs.batch_profile import batch_profile
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.ingest.reschedule import Rescheduled
from tokenmill.jobs.ingest.submit import FileSubmission, Hooks
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.output import Output
from tokenmill.jobs.output_checks import check_paths
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import work as work_on
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.planner.regimes import BatchProfile
from tokenmill.units import number_of

_LOGGED_LINES = 100_000  # lines of a large file between two messages


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to run: its jobs, its store, and the engine for it."""

    source: JobSource
    store: Address
    options: RunOptions
    engine: EngineOptions
    model: str | None = None
    on: str | None = None  # a Ray cluster


def run(
    jobs: Any,
    *,
    output: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **arguments: Unpack[RunArguments],
) -> Summary:
    """Run a durable batch to its end and return a summary.

    `jobs`: a JSONL or Parquet file, an iterable of strings (user messages) and dicts (OpenAI request bodies, lines of
    OpenAI's batch format, or `{"prompt": ...}`), or a pandas, Polars or PyArrow table with `template=`. `output`: the
    file for result lines; without it, read them with `Summary.results()`. `defaults=`: body keys such as max_tokens,
    for jobs that lack them. `store`: a folder or `postgresql://...`; default: the configuration's. The other arguments
    are those of `RunArguments`, with the engine options of `tokenmill.plan`.

    The store keeps jobs and results: the same call after a crash or an interrupt continues where it stopped and
    computes no finished answer again. A job that fails becomes an error line and raises nothing. KeyboardInterrupt
    stops the engine and keeps the batch.
    """
    check_arguments(arguments, RunArguments)
    settings = configuration(config)
    request = batch_request(jobs, output, model, store, settings, dict(arguments))
    stop = Stop()
    with display() if on_progress is None else nullcontext(on_progress) as show:
        return in_thread(lambda report: run_batch(request, settings, stop, report), stop, show)


def submit(
    jobs: Any,
    *,
    output: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    config: Config | str | Path | None = None,
    **arguments: Unpack[SubmitArguments],
) -> Batch:
    """Store jobs as a batch without running it; `work` runs it, here or, from PostgreSQL, on another machine.

    The arguments are those of `run`, without those that only matter while jobs run (`attempts`, `job_timeout_s`, `on`).
    The same call finds the same batch.
    """
    check_arguments(arguments, SubmitArguments)
    settings = configuration(config)
    request = batch_request(jobs, output, model, store, settings, dict(arguments))
    check_request(request)
    with ExitStack() as stack:
        _, submission, _ = _prepare(request, settings, stack, None, Stop(), ignore)
        ingest = stack.enter_context(Ingest(submission, whole=True))
        return ingest.found.batch


def batch_request(
    jobs: Any,
    output: str | Path | None,
    model: str | Path | None,
    store: str | Path | None,
    config: Config,
    arguments: dict[str, Any],
) -> BatchRequest:
    """Keyword arguments as a request; UsageError for a value that is out of range."""
    options = run_options(output, arguments)
    named = {name: arguments.pop(name) for name in ("template", "system", "layout", "key") if name in arguments}
    on = arguments.pop("on", None)
    return BatchRequest(
        JobSource(jobs, **named),
        store_address(store, config),
        options,
        engine_options(arguments),
        None if model is None else str(model),
        on,
    )


def run_batch(request: BatchRequest, config: Config, stop: Stop, on_progress: OnProgress) -> Summary:
    """Run a batch to its end, or until `stop` is requested; blocks, and runs an event loop of its own."""
    began_s = time.monotonic()
    check_request(request)
    with ExitStack() as stack:
        cluster = None
        if request.on is not None:
            asked = (request.on, request.store, request.model, request.engine, config)
            cluster = stack.enter_context(open_cluster(*asked))
        setup, submission, folder = _prepare(request, config, stack, cluster, stop, on_progress)
        known = submission.find()
        if cluster is None and (known is None or not known.finished):
            # before the batch is stored, because other workers may then take its jobs
            setup = setup.plan(partial(_profile, submission, request, setup))
        ingest = stack.enter_context(Ingest(submission, whole=cluster is not None))
        _log_submitted(ingest)
        report = None
        load_s = None
        if not ingest.found.batch.finished:
            work = _Work(submission.store, ingest, request.options, stop, on_progress)
            coroutine = work.on_cluster(cluster) if cluster else work.on_engine(setup.plan(), folder)
            report, load_s = asyncio.run(coroutine)
        batch = submission.store.batch(ingest.found.batch.id)
        return Summary(
            batch,
            request.store,
            output_written=_finish_output(submission.store, batch, ingest),
            seconds=time.monotonic() - began_s,
            report=report,
            load_s=load_s,
            failed_by_code=submission.store.failures_by_code(batch.id),
            nodes=cluster.nodes() if cluster else (),
        )


def _profile(submission: FileSubmission, request: BatchRequest, setup: EngineSetup) -> BatchProfile | None:
    """The lengths of the jobs; None if they come from a stream."""
    path = Path(submission.where)
    if not path.is_file():
        return None
    model = setup.choice.path
    with token_counter(None if model is None else str(model), setup.config) as tokens:
        return batch_profile(path, request.options.defaults, count=tokens.count)


def check_request(request: BatchRequest) -> None:
    """UsageError for a request that cannot be run, before anything is downloaded, planned or stored."""
    request.options.check()
    check_paths(request.options.submission("", time.time()))
    request.source.check()


def _prepare(
    request: BatchRequest,
    config: Config,
    stack: ExitStack,
    cluster: ClusterRun | None,
    stop: Stop,
    on_progress: OnProgress,
) -> tuple[EngineSetup, FileSubmission, Path]:
    """Choose the engine and open the store; nothing is stored yet."""
    choice = cluster.choice if cluster else choose_engine(request.model, request.engine, config, on_progress)
    store = stack.enter_context(Store(request.store, shutdown=stop.shutdown))
    folder = stack.enter_context(work_folder(request.store, config))
    jobs = stack.enter_context(request.source.as_file(folder))
    submission = request.options.submission(choice.model_id, store.now_s())
    hooks = Hooks(_log_lines(), log.info)
    return (
        EngineSetup(choice, request.engine, config),
        FileSubmission(store, jobs.path, submission, None, jobs.name, hooks),
        folder,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The work on one batch."""

    store: Store
    ingest: Ingest
    options: RunOptions
    stop: Stop
    on_progress: OnProgress

    async def on_engine(self, setup: EngineSetup, folder: Path) -> tuple[RunReport | None, float | None]:
        """Open the engine and work; the report, and the seconds that loading took."""
        batch = self.ingest.found.batch
        self.stop.begin()
        self.ingest.on_failure(self.stop.cancel_loading)
        try:
            async with BatchEngine(setup, self.store, folder, self.on_progress) as opened:
                await opened.announce(batch)
                engine, shape = await opened.ready(batch)
                self.stop.loaded()
                report = await work_on(
                    self.store,
                    [batch],
                    engine,
                    shape,
                    outputs=self._outputs(),
                    options=self.options.worker_options(),
                    stop=self.stop.event,
                    on_snapshot=self.on_progress,
                    ingest=self.ingest,
                )
        except asyncio.CancelledError:
            if not self.stop.requested:
                await self.ingest.sealed()  # raises the error for which loading was cancelled
                raise
            return None, None
        return report, opened.load_s

    async def on_cluster(self, cluster: ClusterRun) -> tuple[RunReport | None, float | None]:
        """Work on the machines of a cluster; the report, and the seconds until the first engine was ready."""
        self.stop.begin()
        self.stop.loaded()  # the work can be stopped from the beginning
        batch = self.ingest.found.batch
        options = self.options.worker_options()
        return await cluster.work(self.store, batch, self._outputs(), options, self.stop.event, self.on_progress)

    def _outputs(self) -> dict[int, Output]:
        return {} if self.ingest.output is None else {self.ingest.found.batch.id: self.ingest.output}


def _finish_output(store: Store, batch: Batch, ingest: Ingest) -> bool:
    """Write the output of a finished batch to its end; False if there is none, or another process writes it."""
    if batch.output is None:
        return False
    if not batch.finished:
        return ingest.writes_output
    if ingest.output is not None:
        ingest.output.finish()
        return True
    if not store.claim_output(batch.id):
        return False
    with Output(store, batch) as output:
        output.finish()
    return True


def _log_lines() -> Callable[[int], None]:
    logged = 0

    def stored(lines: int) -> None:
        nonlocal logged
        if lines - logged >= _LOGGED_LINES:
            logged = lines
            log.info("stored %s lines", f"{lines:,}")

    return stored


def _log_submitted(ingest: Ingest) -> None:
    submitted = ingest.found
    batch = submitted.batch
    counts = submitted.batch.counts
    state = "is done" if batch.finished else "continues" if submitted.continued else "begins"
    if ingest.growing:
        log.info("%s %s: %s stored so far; storing the rest while it runs", batch.name, state, counts_text(counts))
    elif counts.total == 0:
        hint = 'write one JSON object per line, such as {"prompt": "Hello"}'
        log.info("%s holds no jobs\nhint: %s", batch.source, hint)
    elif batch.cancelled_s is not None:
        log.info("%s was cancelled; tokenmill retry %s --cancelled resumes it", batch.name, batch.name)
    else:
        log.info("%s %s: %s", batch.name, state, counts_text(counts))
    if submitted.changed is not None and not batch.finished:
        log.info(_changed_text(submitted.changed))
    if batch.output is not None and not ingest.writes_output:
        log.info("another process writes the output of %s; this one works on its jobs", batch.name)


def counts_text(counts: Counts) -> str:
    """The number of jobs, of answered ones and of failed ones."""
    text = number_of(counts.total, "job")
    if counts.done:
        text += f", {counts.done:,} already answered"
    failed = counts.failed + counts.quarantined
    return text + (f", {failed:,} failed" if failed else "")


def _changed_text(changed: Rescheduled) -> str:
    parts = []
    if changed.deadline and changed.batch.deadline_s is not None:
        revived = f"; {number_of(changed.revived, 'expired job')} queued again" if changed.revived else ""
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed.batch.deadline_s))
        parts.append(f"the deadline is now {at}{revived}")
    if changed.priority:
        parts.append(f"the priority is now {changed.batch.priority}")
    return "; ".join(parts)
