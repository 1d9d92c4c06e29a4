"""One run of a batch: `run_once` plans the engine, stores the jobs, loads the engine and works until the end.

The store decides where a run continues, so a batch may be run in several parts: after a crash, or night by night.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenmill.api.batch_forecast import BatchForecast, JobLengths, forecast_batch
from tokenmill.api.early_checks import fail_too_long, warn_of_other_models
from tokenmill.api.energy import EnergyUse, energy_metered
from tokenmill.api.engines.batch import BatchEngine, EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.engines.cluster import ClusterRun, open_cluster
from tokenmill.api.engines.speeds import EngineOrigin, record_speed
from tokenmill.api.progress import OnProgress, log
from tokenmill.api.run_options import RunOptions
from tokenmill.api.run_request import BatchRequest
from tokenmill.api.stopping import Stop
from tokenmill.api.stores import remember_last, work_folder
from tokenmill.api.summary import Summary
from tokenmill.config import Config
from tokenmill.engine.engine import Identity
from tokenmill.hardware.catalog import find
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.ingest.reschedule import Rescheduled
from tokenmill.jobs.ingest.submit import FileSubmission, Hooks
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.estimates import ExpectedJobs
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask
from tokenmill.jobs.worker.loop import work as work_on
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.units import format_seconds, number_of

_LOGGED_LINES = 100_000  # lines of a large file between two messages


def run_once(
    request: BatchRequest, config: Config, stop: Stop, on_progress: OnProgress, *, until_s: float | None = None
) -> Summary:
    """Run a batch to its end, until `stop` is requested, or until a Unix time; blocks, with an event loop of its own.

    A time in the past stores the batch and plans its engine without loading it.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        cluster = None
        if request.on is not None:
            asked = (request.on, request.store, request.model, request.engine, config)
            cluster = stack.enter_context(open_cluster(*asked))
        setup, submission, folder = prepare(request, config, stack, cluster, stop, on_progress)
        known = submission.find()
        lengths = None
        if cluster is None and (known is None or not known.finished):
            lengths = JobLengths.read(Path(submission.where), request.options.defaults, setup)
            # before the batch is stored, because other workers may then take its jobs
            setup = setup.plan(None if lengths is None else lengths.profile)
        over = until_s is not None and until_s <= time.time()
        ingest = stack.enter_context(Ingest(submission, whole=over or cluster is not None))
        _log_submitted(ingest)
        remember_last(request.store, ingest.found.batch)
        batch = _checked(submission.store, ingest.found.batch, setup)
        forecast = None if lengths is None or batch.finished else forecast_batch(lengths, batch.counts, setup)
        if forecast is not None:
            _log_forecast(forecast, until_s)
        done = _Done(time_up=over)
        if not batch.finished and not over:
            expected = None if forecast is None else forecast.expected
            work = _Work(submission.store, ingest, request.options, stop, on_progress, until_s, expected)
            done = asyncio.run(work.on_cluster(cluster) if cluster else work.on_engine(setup.plan(), folder))
        ended = _summary(request, config, submission.store, ingest, done)
        return replace(
            ended,
            seconds=time.monotonic() - began_s,
            nodes=cluster.nodes() if cluster else (),
            forecast_s=None if forecast is None else forecast.seconds,
            untuned=setup.choice.model if setup.measures_slots else None,
        )


def _summary(request: BatchRequest, config: Config, store: Store, ingest: Ingest, done: "_Done") -> Summary:
    """The summary, without its nodes; finishes the output of a finished batch."""
    batch = store.batch(ingest.found.batch.id)
    return Summary(
        batch,
        request.store,
        output_written=_finish_output(store, batch, ingest),
        seconds=0.0,
        report=done.report,
        load_s=done.load_s,
        failed_by_code=store.failures_by_code(batch.id),
        engine=done.engine,
        energy_j=done.energy.joules.total,
        per_hour=config.costs.per_hour,
        currency=config.costs.currency,
        time_up=done.time_up and not batch.finished,
    )


def _checked(store: Store, batch: Batch, setup: EngineSetup) -> Batch:
    """The batch after the checks that need no engine."""
    if batch.finished or not batch.counts.pending:
        return batch
    warn_of_other_models(store, batch, setup.choice)
    return store.batch(batch.id) if fail_too_long(store, batch, setup) else batch


def prepare(
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
class _Done:
    """What the work on a batch came to."""

    report: RunReport | None = None
    load_s: float | None = None  # None: no engine was started
    engine: Identity | None = None
    energy: EnergyUse = field(default_factory=EnergyUse)
    time_up: bool = False


@dataclass(frozen=True, slots=True)
class _Work:
    """The work on one batch."""

    store: Store
    ingest: Ingest
    options: RunOptions
    stop: Stop
    on_progress: OnProgress
    until_s: float | None
    expected: ExpectedJobs | None

    async def on_engine(self, setup: EngineSetup, folder: Path) -> _Done:
        """Open the engine and work."""
        batch = self.ingest.found.batch
        self.stop.begin()
        self.ingest.on_failure(self.stop.cancel_loading)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._time_limit())
                energy = await stack.enter_async_context(energy_metered())
                opened = await stack.enter_async_context(BatchEngine(setup, self.store, folder, self.on_progress))
                await opened.announce(batch)
                engine, shape = await opened.ready(batch)
                self.stop.loaded()
                report = await work_on(
                    WorkTask(
                        self.store,
                        [batch],
                        engine,
                        shape,
                        outputs=self._outputs(),
                        options=replace(self.options.worker_options(), expected=self.expected),
                        stop=self.stop.event,
                        on_snapshot=self.on_progress,
                        ingest=self.ingest,
                    )
                )
        except asyncio.CancelledError:
            if not self.stop.requested and not self.stop.time_up:
                await self.ingest.sealed()  # raises the error for which loading was cancelled
                raise
            return _Done(time_up=self.stop.time_up)
        _record_speed(setup, report, engine.identity, energy.watts)
        return _Done(report, opened.load_s, engine.identity, energy, self.stop.time_up)

    async def on_cluster(self, cluster: ClusterRun) -> _Done:
        """Work on the machines of a cluster; loading is until the first engine is ready."""
        self.stop.begin()
        self.stop.loaded()  # the work can be stopped from the beginning
        batch = self.ingest.found.batch
        options = self.options.worker_options()
        async with self._time_limit():
            report, load_s = await cluster.work(
                self.store, batch, self._outputs(), options, self.stop.event, self.on_progress
            )
        return _Done(report, load_s, time_up=self.stop.time_up)

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        """Stop the work when its time is up."""
        if self.until_s is None:
            yield
            return
        ending = asyncio.create_task(self.stop.end_by(self.until_s))
        try:
            yield
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending

    def _outputs(self) -> dict[int, Output]:
        return {} if self.ingest.output is None else {self.ingest.found.batch.id: self.ingest.output}


def _record_speed(setup: EngineSetup, report: RunReport, engine: Identity, watts: float | None) -> None:
    """Store the measured speed for later estimates; a server behind a URL runs on an unknown machine."""
    if setup.planned is not None:
        machine = setup.planned.plan.machine
    elif setup.choice.record is not None:
        machine = find(setup.config.machine)
    else:
        return
    origin = EngineOrigin(engine.model_id, engine.kind, engine.build)
    record_speed(setup.choice.state, machine, report, origin, watts=watts)


def _finish_output(store: Store, batch: Batch, ingest: Ingest) -> bool:
    """Write the output of a finished batch to its end; False if it has no output or another process writes it."""
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


def _log_forecast(forecast: BatchForecast, until_s: float | None) -> None:
    """Log tokens and time, and when the batch will be done if that is before the time limit of this run."""
    work = forecast.work
    tokens = f"{work.prompt_tokens:,.0f} prompt and at most {work.output_tokens:,.0f} answer tokens"
    if forecast.seconds is None:
        log.info("forecast: %s; time unknown", tokens)
        return
    done_s = time.time() + forecast.seconds
    at = time.strftime("; done at %Y-%m-%d %H:%M", time.localtime(done_s))
    in_time = until_s is None or done_s <= until_s
    log.info("forecast: %s, at most %s%s", tokens, format_seconds(forecast.seconds), at if in_time else "")


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
