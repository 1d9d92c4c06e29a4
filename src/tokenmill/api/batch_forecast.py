"""The forecast of a batch before its engine is loaded: tokens, time, energy and disk space.

`tokenmill run --dry-run` prints a `RunForecast`, which starts, stores and downloads nothing. A run uses a
`BatchForecast` for the remaining time until its first job has finished.
"""

import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.engines.speeds import EngineSpeeds, speeds_for, watts_for
from tokenmill.api.progress import OnProgress
from tokenmill.api.run_request import BatchRequest
from tokenmill.api.tokens import token_counter
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import THIS
from tokenmill.jobs.batch_profile import batch_profile
from tokenmill.jobs.ingest.submit import batch_key
from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.estimates import ExpectedJobs, MeasuredRates, RemainingWork, eta_s
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.planner.plan import Plan
from tokenmill.planner.regimes import BatchProfile
from tokenmill.storage.lines import hash_file

_STORE_FACTOR = 2  # bytes of the store for each byte of the job file: its lines, and as much for answers and indexes


@dataclass(frozen=True, slots=True)
class JobLengths:
    """The lengths of a file's jobs, and why they are estimated; None: counted with the model's vocabulary."""

    batch: BatchProfile
    why_estimated: str | None

    @classmethod
    def read(cls, path: Path, defaults: Any, setup: EngineSetup) -> Self | None:
        """Read a job file; None for a stream, and for a file without a job that can be read."""
        if not path.is_file():
            return None
        model = setup.choice.path
        with token_counter(None if model is None else str(model), setup.config) as tokens:
            found = batch_profile(path, defaults, count=tokens.count)
        return None if found is None else cls(found, tokens.why_not)

    def profile(self) -> BatchProfile:
        """The lengths alone, for a plan."""
        return self.batch


@dataclass(frozen=True, slots=True)
class BatchForecast:
    """The cost of the jobs of a batch that have no outcome; answers have their maximum length."""

    lengths: JobLengths
    jobs: int
    done: int  # jobs with an outcome
    speeds: EngineSpeeds | None  # None: unknown
    watts: float | None  # of the whole machine, configured or measured by an earlier batch; None: unknown

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self.jobs * (self.lengths.batch.prefix_tokens + self.lengths.batch.own_tokens)

    @property
    def work(self) -> RemainingWork:
        """Prompt tokens to compute, with every shared prefix computed once, and answer tokens."""
        mean = self._mean
        return RemainingWork(self.jobs * mean.prompt_tokens, self.jobs * mean.output_tokens)

    @property
    def work_s(self) -> float | None:
        """Seconds without loading; None: unknown."""
        speeds = self.speeds
        if speeds is None or not self.jobs:
            return 0.0 if not self.jobs else None
        return eta_s(self.work, speeds.rates, max(1, min(speeds.width, self.jobs)))

    @property
    def seconds(self) -> float | None:
        """Seconds with loading; None: unknown."""
        load_s = self.speeds.load_s or 0.0 if self.speeds is not None and self.jobs else 0.0
        return None if self.work_s is None else self.work_s + load_s

    @property
    def energy_j(self) -> float | None:
        """Energy of the whole machine; None: unknown."""
        return None if self.watts is None or self.seconds is None else self.watts * self.seconds

    @property
    def expected(self) -> ExpectedJobs:
        """The expectation for the worker's progress; without rates if the speed is unknown."""
        return ExpectedJobs(self._mean, MeasuredRates() if self.speeds is None else self.speeds.rates)

    @property
    def _mean(self) -> RemainingWork:
        batch = self.lengths.batch
        return RemainingWork(batch.own_tokens, batch.answer_tokens)


def forecast_batch(lengths: JobLengths, counts: Counts, setup: EngineSetup) -> BatchForecast:
    """The forecast of a batch of which `counts` are stored so far; `setup` has a plan if it starts an engine."""
    batch = lengths.batch
    machine = setup.config.machine
    depth = batch.prefix_tokens + batch.own_tokens + batch.answer_tokens // 2
    return BatchForecast(
        lengths,
        max(0, batch.jobs - counts.final),
        counts.final,
        speeds_for(setup.choice, setup.planned, machine)(depth),
        setup.config.costs.watts or watts_for(setup.choice, setup.planned, machine),
    )


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space that a run needs at a place, and the free space there."""

    needed_bytes: int
    path: Path | None  # None: on another machine
    free_bytes: int | None  # None: unknown


@dataclass(frozen=True, slots=True)
class RunForecast:
    """What a run would do."""

    batch: BatchForecast
    model: str
    plan: Plan | None  # None: no engine would be started
    download: DiskSpace | None  # None: the model is on this machine
    store: DiskSpace | None  # None: the jobs are stored already, or on a server


def forecast_run(request: BatchRequest, config: Config, on_progress: OnProgress) -> RunForecast:
    """Forecast a run without starting it; DoesNotFit if its model does not fit, UsageError for a stream."""
    request.check()
    if request.on is not None:
        raise UsageError("the machines of a cluster are only known after connecting", hint="omit --on, or --dry-run")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = Path(stack.enter_context(request.source.as_file(folder)).path)
        choice = choose_engine(request.model, request.engine, config, on_progress, dry_run=True)
        setup = EngineSetup(choice, request.engine, config)
        lengths = JobLengths.read(path, request.options.defaults, setup)
        if lengths is None:
            raise UsageError(
                f"no job can be read from {request.source.jobs}", hint="use a file that tokenmill lint can read"
            )
        setup = setup.plan(lengths.profile)
        counts = _stored(request, choice.model_id, path)
        batch = forecast_batch(lengths, counts or Counts(), setup)
        plan = setup.planned.plan if setup.planned is not None else None
        here = (request.engine.machine or config.machine) == THIS
        download = None
        if plan is not None and choice.path is not None and not choice.path.exists():
            download = _space(config.models_path if here else None, plan.profile.bytes)
        store = None
        if counts is None and isinstance(request.store, Path):
            store = _space(request.store if here else None, _STORE_FACTOR * path.stat().st_size)
    return RunForecast(batch, choice.model, plan, download, store)


def _stored(request: BatchRequest, model_id: str, path: Path) -> Counts | None:
    """The jobs of the batch, if an earlier run stored it."""
    hashed = hash_file(path)
    if hashed is None or not has_batches(request.store):
        return None
    with StoreReader(request.store) as reader:
        batch = reader.find(batch_key(request.options.submission(model_id, time.time()), hashed.digest))
    return None if batch is None else batch.counts


def _space(place: Path | None, needed_bytes: int) -> DiskSpace:
    """The space needed at a place that may not exist yet; `place` None: on another machine."""
    folders = () if place is None else (place, *place.parents)
    there = next((folder for folder in folders if folder.exists()), None)
    try:
        free = None if there is None else shutil.disk_usage(there).free
    except OSError:
        free = None
    return DiskSpace(needed_bytes, place, free)
