"""`tokenmill tune`: the operating point of a model on this machine, found by measuring."""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tokenmill.cli.output import Common, say, show, show_json, show_text
from tokenmill.cli.plan_view import render
from tokenmill.cli.starting import EngineOptions, Wanted, load_shown, planned
from tokenmill.cli.tune_view import announced, outcome_shown, progress_line
from tokenmill.cli.tune_wishes import aim_of, requests_in
from tokenmill.engine.engine import Request
from tokenmill.engine.native.order import most_lanes
from tokenmill.errors import EngineError, UsageError
from tokenmill.plan.plan import Plan
from tokenmill.tune import history, remember
from tokenmill.tune.drive import Bed, drive
from tokenmill.tune.energy import Meter, pynvml
from tokenmill.tune.expected import figures_at
from tokenmill.tune.here import place_here
from tokenmill.tune.measure import How
from tokenmill.tune.overlay import circumstances
from tokenmill.tune.point import Aim, AimKind, OperatingPoint, Place, Trial
from tokenmill.tune.predicted import forecaster
from tokenmill.tune.quiet import Watch
from tokenmill.tune.search import Search
from tokenmill.tune.servers import ServerStand, thinned
from tokenmill.tune.space import Space, space_for, start_for
from tokenmill.tune.stand import NativeStand, Starter
from tokenmill.tune.verdict import point as verdict
from tokenmill.tune.work import WorkFor, drawing, drawn_name, handing, jobs_name
from tokenmill.units import number_of

DOES_NOT_FIT, INTERRUPTED = 3, 130
NOISE = 0.03
MOST_SEQUENCES = 224


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be tuned, and how."""

    wanted: Wanted
    place: Place
    aim: Aim
    space: Space
    search: Search
    work: WorkFor
    work_name: str
    drawn: bool  # the aim's own jobs, not the user's
    how: How
    state: Path
    busy: bool

    @property
    def plan(self) -> Plan:
        """The plan that it starts from."""
        return self.wanted.plan


def tune(
    model: str,
    /,
    *,
    aim: AimKind = "throughput",
    first_token: str | None = None,
    within: str = "10%",
    jobs: str | None = None,
    head_tokens: int = 512,
    tail_tokens: int = 64,
    output_tokens: int = 64,
    trials: int | None = None,
    trial_seconds: float = 5.0,
    fresh: bool = False,
    busy: bool = False,
    options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find the best settings for a model on this machine by measuring, in one load where the engine allows.

    Threads, sequences, micro-batch, cache types, flash attention and context are turned on the running native engine;
    servers are started again, as seldom as can be. What is given as an option stays as it is. The point is saved, and
    plan, run and serve use it for what they are not told otherwise. Ctrl-C keeps every trial: the same command goes on.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model, such as smollm2.
    aim:
        What is best: throughput (most tokens of a batch), latency (the same while an interactive request's first token
        comes within --first-token), cores (fewest threads within --within of the best), context (most context within
        --within of the best), or energy (least for each token).
    first_token:
        With --aim latency: the most that an interactive request may wait beside a batch, such as 2s or 500ms.
    within:
        With --aim cores and context: the share of the best throughput that may be given up; default: 10%.
    jobs:
        A file of jobs like those to come, to measure with; default: prompts drawn from the model's vocabulary.
    head_tokens:
        Of drawn prompts: tokens at the beginning that all jobs share; default: 512.
    tail_tokens:
        Tokens of a prompt that are its own; default: 64.
    output_tokens:
        Tokens of an answer; default: 64.
    trials:
        At most so many; default: as many as it takes, within a share of what trying everything would.
    trial_seconds:
        How long each trial measures; default: 5.
    fresh:
        Forget trials of the same model, machine and build; default: they count, and are not made again.
    busy:
        Count trials although other processes use the machine: for one that is never quiet.
    """
    wish = aim_of(aim, first_token, within, head_tokens, tail_tokens, output_tokens, options)
    if trials is not None and trials < 1:
        raise UsageError(f"--trials must be at least 1, not {trials}")
    if trial_seconds <= 0:
        raise UsageError("--trial-seconds must be more than 0")
    if aim == "energy":
        _check_energy()
    requests = None if jobs is None else requests_in(jobs)
    wanted = planned(model, replace(options, point=False), common)
    if not wanted.plan.fits:
        show(*render(wanted.plan))
        return DOES_NOT_FIT
    state = common.load_config().state_path
    task = _task(wanted, wish, requests, options, trials, trial_seconds, busy=busy, state=state)
    if fresh:
        remember.forget_trials(task.state, task.place)
    known = remember.trials_of(task.state, task.place, task.work_name, wish)
    for line in announced(
        task.plan, wish, task.space, task.search, known, trial_seconds, kind=wanted.config.kind,
        jobs=None if requests is None else len(requests),
    ):  # fmt: skip
        say(line)
    others = remember.for_others(task.state, task.place, task.work_name, wish)
    task.search.beside(sum(task.space.holds(trial.dials) for trial in others))
    try:
        found = asyncio.run(_tuned(task, known))
    except asyncio.CancelledError:
        kept = len(remember.trials_of(task.state, task.place, task.work_name, wish))
        say(f"stopped: {number_of(kept, 'trial')} kept; the same command goes on from there")
        return INTERRUPTED
    path = remember.save_point(task.state, found)
    if common.json:
        show_json(found)
    else:
        show(*outcome_shown(found, task.search.reason))
        show_text(str(path))
    return 0


async def _tuned(task: Task, known: tuple[Trial, ...]) -> OperatingPoint:
    _end_on_signals()
    began_s = time.monotonic()
    name = "tune-" + hashlib.sha256(os.fsencode(task.wanted.model_path.absolute())).hexdigest()[:8]
    starter = Starter(task.wanted.model_path, task.wanted.config, task.state, name, load_shown)
    kind = NativeStand if task.wanted.config.kind == "native" else ServerStand
    stand = kind(task.plan, starter, most_sequences=max(task.space.sequences))
    bed = Bed(task.plan, stand, task.how, watch=_watch(task))
    try:
        made = await drive(
            bed, task.search, task.work, known=known, keep=_keeping(task, bed),
            tell=lambda step: say(progress_line(step)),
        )  # fmt: skip
    finally:
        await stand.close()
    if bed.no_energy:
        say(f"energy was not measured: {bed.no_energy}")
    held = tuple(trial for trial in made if task.space.holds(trial.dials))  # not what was found with other options
    if not any(trial.counts for trial in held):
        raise _nothing(held or made)
    found = verdict(
        task.place, task.aim, held, task.search.noise, seconds=time.monotonic() - began_s,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return replace(found, under=circumstances(task.plan.goal))


def _check_energy() -> None:
    """EngineError where nothing tells energy: an hour of trials would show nothing."""
    meter = Meter()
    meter.start()
    used = meter.stop()
    if used.total is None:
        raise EngineError(
            f"energy cannot be measured here: {used.why_not}",
            hint="run it as root where RAPL wants that; --aim cores is the nearest that needs no meter",
        )


def _nothing(made: tuple[Trial, ...]) -> EngineError:
    disturbed = next((trial.disturbed for trial in reversed(made) if trial.disturbed), None)
    if disturbed is not None:
        return EngineError(
            f"every trial was disturbed, the last by this: {disturbed}",
            hint="wait until the machine is quiet, or add --busy to count them as they are",
        )
    detail = next((trial.detail for trial in reversed(made) if trial.detail), None)
    return EngineError(f"no trial came to an end: {detail}", hint="tokenmill tune --fresh begins anew")


def _watch(task: Task) -> Callable[[], Watch] | None:
    if task.busy:
        return None
    return lambda: Watch(nvml=pynvml if task.plan.placement.gpus else None)


def _keeping(task: Task, bed: Bed) -> Callable[[Trial], None]:
    """Keeps each trial, and what it measured in the machine's history beside what was predicted."""

    def keep(trial: Trial) -> None:
        remember.keep_trial(task.state, task.place, task.work_name, trial, task.aim)
        if trial.counts and not task.busy:
            place = task.place
            history.append(
                task.state,
                history.Speed(
                    trial.when or "", place.machine, place.machine_id, place.model, place.model_id, place.engine,
                    place.build, "tune", trial.dials, bed.depth, trial.figures,
                    figures_at(task.plan, task.aim, trial.dials, depth=bed.depth, drawn=task.drawn),
                ),
            )  # fmt: skip

    return keep


def _end_on_signals() -> None:
    task = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _task(
    wanted: Wanted,
    aim: Aim,
    requests: tuple[Request, ...] | None,
    options: EngineOptions,
    trials: int | None,
    seconds: float,
    *,
    busy: bool,
    state: Path,
) -> Task:
    plan, config = wanted.plan, wanted.config
    place = place_here(plan.machine, plan.profile.name, wanted.model_path, config)
    if place is None:
        raise EngineError(
            f"the build of {config.kind} cannot be told, so nothing could be remembered of it",
            hint="set engine.binary to a program that states its version",
        )
    most = min(MOST_SEQUENCES, most_lanes(plan.profile)) if config.kind == "native" else MOST_SEQUENCES
    space = space_for(plan, aim, cores=_cores(plan), most_sequences=options.sequences or most)
    if config.kind != "native":
        space = thinned(plan, space)
    needed = max(space.context)
    length = aim.prompt_tokens + aim.tail_tokens + aim.output_tokens
    if requests is None and length >= needed:
        raise UsageError(
            f"jobs of {length:,} tokens do not fit a context of {needed:,}",
            hint="fewer --head-tokens, or more --context",
        )
    search = Search(
        space, aim, start_for(plan, space), forecast=forecaster(plan, aim), noise=NOISE, most_trials=trials
    )  # fmt: skip
    work, name = drawing(aim), drawn_name(aim)
    if requests is not None:
        work, name = handing(requests, aim), jobs_name(requests)
    name = " ".join((name, *circumstances(plan.goal)))
    if busy:
        name += " on a busy machine"  # such trials are no news to a tuning that wants quiet ones
    how = How(seconds, NOISE, latency=aim.kind == "latency")
    return Task(wanted, place, aim, space, search, work, name, requests is None, how, state, busy)


def _cores(plan: Plan) -> int:
    """Physical cores that may be used, as the planner counts them."""
    cores = plan.machine.cpu.cores
    if cores is None:
        return plan.settings.threads
    return min(cores, int(plan.machine.limits.cgroup_cpus or cores) or 1)
