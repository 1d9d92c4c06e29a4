"""`tune`: find the best settings of an engine for a model on this machine by measuring.

`prepare_tuning` plans, checks the options and reads what earlier trials found; `Tuning.run` measures. Every trial is on
disk before the next one starts, so the same call continues after an interruption. The search space and every trial
are logged.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Unpack

from tokenmill.api.background import Background, Emit
from tokenmill.api.display import display
from tokenmill.api.engines.choose import model_path
from tokenmill.api.options import EngineArguments, EngineOptions, engine_options
from tokenmill.api.planning.plan import EnginePlan, configuration, plan_engine
from tokenmill.api.progress import OnProgress, Progress, log
from tokenmill.api.tune_options import TuneOptions, requests_in
from tokenmill.config import Config
from tokenmill.engine.engine import Request
from tokenmill.errors import EngineError, UsageError
from tokenmill.native.launching import Tell
from tokenmill.native.worker_config import max_slots
from tokenmill.planner.plan import Plan
from tokenmill.tuner import history, point_store
from tokenmill.tuner.apply import circumstances
from tokenmill.tuner.describe import announced, progress_line
from tokenmill.tuner.energy import Meter, pynvml
from tokenmill.tuner.engine_rig import NativeRig, ServerRig, Starter, thinned
from tokenmill.tuner.measure import MeasureOptions
from tokenmill.tuner.noise_monitor import NoiseMonitor
from tokenmill.tuner.point import Aim, AimKind, OperatingPoint, PointScope, Trial
from tokenmill.tuner.point_scope import build_of, place_here
from tokenmill.tuner.search.forecasts import figures_at, forecaster
from tokenmill.tuner.search.search import Search
from tokenmill.tuner.search.space import Space, space_for, start_for
from tokenmill.tuner.search.verdict import point as verdict
from tokenmill.tuner.trial_run import TrialContext, drive
from tokenmill.tuner.work import WorkFor, generated_jobs, generated_jobs_name, user_jobs, user_jobs_name
from tokenmill.units import number_of

_NOISE = 0.03  # relative spread of repeated measurements, until it is measured
_MAX_SEQUENCES = 224

ShownLoad = Callable[[], AbstractContextManager[Tell]]
"""Opens the display of one load."""


def tune(
    model: str | Path | None = None,
    *,
    aim: AimKind = "throughput",
    first_token: str | float | None = None,
    within: str | float = 0.1,
    jobs: str | Path | None = None,
    prefix_tokens: int = 512,
    own_tokens: int = 64,
    answer_tokens: int = 64,
    trials: int | None = None,
    trial_seconds: float = 5.0,
    fresh: bool = False,
    busy: bool = False,
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[EngineArguments],
) -> OperatingPoint:
    """Measure which settings are best and save them; `plan`, `run`, `load` and `serve` use them from then on.

    `model`: as for `tokenmill.load`. `aim`: throughput (most tokens of a batch), latency (the same, while the first
    token of an interactive request comes within `first_token` seconds), cores or context (fewest threads or most
    context `within` a share of the best throughput), or energy (least for each token). `jobs`: a file of typical jobs
    to measure with; default: drawn prompts with `prefix_tokens` shared and `own_tokens` own tokens, and answers of
    `answer_tokens`. `trials`: at most this many, earlier ones included. `fresh`: forget earlier trials. `busy`: count
    trials although other processes use the machine. `on_progress` gets `tokenmill.api.progress` events of loads in the
    calling thread; default: a progress bar. Trials are logged.

    The other options are those of `tokenmill.plan`; a setting that they fix is not varied. Ctrl-C keeps every finished
    trial, and the same call continues. Raises DoesNotFit if the plan does not fit, and EngineError if no trial
    could be measured.
    """
    asked = TuneOptions(
        aim=aim,
        first_token=first_token,
        within=within,
        jobs=None if jobs is None else str(jobs),
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        answer_tokens=answer_tokens,
        trials=trials,
        trial_seconds=trial_seconds,
        fresh=fresh,
        busy=busy,
    )
    settings = configuration(config)
    with nullcontext(on_progress) if on_progress is not None else display() as report:
        path = str(model_path(None if model is None else str(model), settings, report))
    tuning = prepare_tuning(path, asked, engine_options(options), settings)
    try:
        return _run(tuning, on_progress)
    except KeyboardInterrupt:
        tuning.log_stopped()
        raise


def _run(tuning: "Tuning", on_progress: OnProgress | None) -> OperatingPoint:
    """Run a tuning on a background thread and report the progress of its loads in the calling thread."""

    async def run(emit: Emit[Progress | None]) -> OperatingPoint:
        @contextmanager
        def load() -> Iterator[Tell]:
            yield emit
            emit(None)  # the load has ended

        return await tuning.run(load)

    with ExitStack() as bar, Background() as background:
        draw: OnProgress | None = None

        def report(event: Progress | None) -> None:
            nonlocal draw
            if event is None:
                bar.close()
                draw = None
            elif on_progress is not None:
                on_progress(event)
            else:
                draw = draw or bar.enter_context(display())
                draw(event)

        return background.report(run, report)


def prepare_tuning(model: str, options: TuneOptions, engine: EngineOptions, config: Config) -> "Tuning":
    """Check the options, plan, and log what will be measured. Loads nothing.

    UsageError, DoesNotFit, or EngineError where the aim cannot be measured on this machine.
    """
    aim = options.aim_for(engine)
    if aim.kind == "energy":
        _check_energy()
    requests = None if options.jobs is None else requests_in(options.jobs)
    planned = plan_engine(model, replace(engine, point=False), config).require_fit()
    place = _place(planned)
    space = _space(planned, aim, engine.sequences)
    work = _drawn_work(aim, space) if requests is None else _jobs_work(aim, requests)
    work_name = " ".join((work.name, *circumstances(planned.plan.goal)))
    if options.busy:
        work_name += " on a busy machine"  # such trials are not comparable with those of an idle machine
    work = replace(work, name=work_name)
    if options.fresh:
        point_store.forget_trials(config.state_path, place)
    tuning = Tuning(planned, place, aim, space, work, options, config.state_path)
    tuning.log_announcement()
    return tuning


@dataclass(frozen=True, slots=True)
class _Work:
    """The jobs that every trial measures with."""

    make: WorkFor
    name: str  # trials with different work are not compared
    jobs: int | None = None  # of the user's file; None: drawn


class Tuning:
    """A prepared tuning: the plan, the search space, and the trials of earlier tunings."""

    def __init__(
        self,
        planned: EnginePlan,
        place: PointScope,
        aim: Aim,
        space: Space,
        work: _Work,
        options: TuneOptions,
        state: Path,
    ) -> None:
        """Use `prepare_tuning`."""
        self._planned = planned
        self._place = place
        self._aim = aim
        self._space = space
        self._work = work
        self._options = options
        self._state = state
        plan = planned.plan
        self._search = Search(
            space,
            aim,
            start_for(plan, space),
            forecast=forecaster(plan, aim),
            noise=_NOISE,
            max_trials=options.trials,
        )
        self._known = self._kept()
        self.path: Path | None = None
        """The file in which the operating point was saved."""

    @property
    def reason(self) -> str:
        """Why the search ended, or its next step."""
        return self._search.reason

    async def run(self, shown_load: ShownLoad) -> OperatingPoint:
        """Measure until the search is done, and save the operating point. Cancelling it keeps the trials."""
        began_s = time.monotonic()
        others = point_store.for_others(self._state, self._place, self._work.name, self._aim)
        self._search.exclude(sum(self._space.holds(trial.dials) for trial in others))
        trials = await self._measure(shown_load)
        inside = tuple(trial for trial in trials if self._space.holds(trial.dials))  # earlier ones may lie outside
        if not any(trial.counts for trial in inside):
            raise _nothing_measured(inside or trials)
        found = verdict(
            self._place,
            self._aim,
            inside,
            self._search.noise,
            seconds=time.monotonic() - began_s,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        goal = self._planned.plan.goal
        given = goal.context is not None and self._aim.kind != "context"
        found = replace(found, under=circumstances(goal), context_given=given)
        self.path = point_store.save_point(self._state, found)
        return found

    def log_announcement(self) -> None:
        """Log the settings to vary and the expected duration."""
        lines = announced(
            self._planned.plan,
            self._aim,
            self._space,
            self._search,
            self._known,
            self._options.trial_seconds,
            kind=self._planned.config.kind,
            jobs=self._work.jobs,
        )
        for line in lines:
            log.info(line)

    def log_stopped(self) -> None:
        """Log how many trials an interrupted tuning keeps."""
        log.info("stopped: %s kept; tune again to continue", number_of(len(self._kept()), "trial"))

    def _kept(self) -> tuple[Trial, ...]:
        return point_store.trials_of(self._state, self._place, self._work.name, self._aim)

    async def _measure(self, shown_load: ShownLoad) -> tuple[Trial, ...]:
        planned = self._planned
        name = "tune-" + hashlib.sha256(os.fsencode(planned.model_path.absolute())).hexdigest()[:8]
        starter = Starter(planned.model_path, planned.config, self._state, name, shown_load)
        kind = NativeRig if planned.config.kind == "native" else ServerRig
        rig = kind(planned.plan, starter, max_sequences=max(self._space.sequences))
        measure = MeasureOptions(self._options.trial_seconds, _NOISE, latency=self._aim.kind == "latency")
        context = TrialContext(planned.plan, rig, measure, watch=self._watch())
        try:
            trials = await drive(
                context,
                self._search,
                self._work.make,
                known=self._known,
                keep=lambda trial: self._keep(trial, context.depth),
                tell=lambda step: log.info(progress_line(step)),
            )
        finally:
            await rig.close()
        if context.no_energy:
            log.info("energy was not measured: %s", context.no_energy)
        return trials

    def _watch(self) -> Callable[[], NoiseMonitor] | None:
        if self._options.busy:
            return None
        gpus = self._planned.plan.placement.gpus
        return lambda: NoiseMonitor(nvml=pynvml if gpus else None)

    def _keep(self, trial: Trial, depth: int) -> None:
        """Store a trial, and its measured and predicted speeds in the machine's history."""
        place = self._place
        point_store.keep_trial(self._state, place, self._work.name, trial, self._aim)
        if not trial.counts or self._options.busy:
            return
        synthetic = self._work.jobs is None
        speed = history.SpeedRecord(
            trial.when or "",
            place.machine,
            place.machine_id,
            place.model,
            place.model_id,
            place.engine,
            place.build,
            "tune",
            trial.dials,
            depth,
            trial.figures,
            figures_at(self._planned.plan, self._aim, trial.dials, depth=depth, generated=synthetic),
        )
        history.append(self._state, speed)


def _place(planned: EnginePlan) -> PointScope:
    plan = planned.plan
    config = planned.config
    place = place_here(plan.machine, plan.profile.name, planned.model_path, config)
    if place is None:
        build_of(config)  # raises the reason if the engine is not installed
        raise EngineError(
            f"the build of {config.kind} is unknown, so trials cannot be stored",
            hint="set engine.binary to a program that reports its version",
        )
    return place


def _space(planned: EnginePlan, aim: Aim, sequences: int | None) -> Space:
    plan = planned.plan
    native = planned.config.kind == "native"
    limit = min(_MAX_SEQUENCES, max_slots(plan.profile)) if native else _MAX_SEQUENCES
    space = space_for(plan, aim, cores=_cores(plan), max_sequences=sequences or limit)
    return space if native else thinned(plan, space)


def _drawn_work(aim: Aim, space: Space) -> _Work:
    context = max(space.context)
    length = aim.prompt_tokens + aim.tail_tokens + aim.output_tokens
    if length >= context:
        raise UsageError(
            f"jobs of {length:,} tokens do not fit a context of {context:,}",
            hint="lower prefix_tokens, or raise context",
        )
    return _Work(generated_jobs(aim), generated_jobs_name(aim))


def _jobs_work(aim: Aim, requests: tuple[Request, ...]) -> _Work:
    return _Work(user_jobs(requests, aim), user_jobs_name(requests), len(requests))


def _cores(plan: Plan) -> int:
    """The number of usable physical cores, as the planner counts them."""
    cores = plan.machine.cpu.cores
    if cores is None:
        return plan.settings.threads
    return min(cores, int(plan.machine.limits.cgroup_cpus or cores) or 1)


def _check_energy() -> None:
    """EngineError if energy cannot be measured on this machine."""
    meter = Meter()
    meter.start()
    used = meter.stop()
    if used.total is None:
        raise EngineError(
            f"energy cannot be measured on this machine: {used.why_not}",
            hint="run as root if RAPL requires it, or use the aim cores",
        )


def _nothing_measured(trials: tuple[Trial, ...]) -> EngineError:
    disturbed = next((trial.disturbed for trial in reversed(trials) if trial.disturbed), None)
    if disturbed is not None:
        return EngineError(
            f"every trial was disturbed; the last one: {disturbed}",
            hint="wait until the machine is idle, or accept such trials with busy (--busy)",
        )
    detail = next((trial.detail for trial in reversed(trials) if trial.detail), None)
    return EngineError(f"no trial could be measured: {detail}", hint="fresh (--fresh) forgets earlier trials")
