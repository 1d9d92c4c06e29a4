"""What commands share that start an engine: its options, the plan for it, and a load that can be watched."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tokenmill.cli.calibrated import corrected
from tokenmill.cli.goal_options import Knobs
from tokenmill.cli.named import where
from tokenmill.cli.output import Common, say
from tokenmill.cli.points import laid_over, say_point
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.dialects import Finding
from tokenmill.engine.loading import LoadProgress
from tokenmill.engine.native.order import goal_for as native_goal
from tokenmill.engine.reserve import decisions
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import UnknownModel, UsageError
from tokenmill.hardware.catalog import THIS, find
from tokenmill.hardware.machine import Machine
from tokenmill.model import catalog
from tokenmill.model.gguf import is_url
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.plan.goal import DialectName, Goal
from tokenmill.plan.make import make
from tokenmill.plan.plan import Plan
from tokenmill.tune.overlay import Overlaid, decided, misplaced
from tokenmill.units import format_bytes, format_seconds

KINDS: dict[str, DialectName] = {
    "native": "llama.cpp", "llama-server": "llama.cpp", "ik_llama": "ik_llama", "vllm": "vllm",
}  # fmt: skip
SEQUENCES = 8  # batch work profits from several; what fits decides below that
_STEP_SAID = 0.1  # without a terminal, a line for each tenth of a load


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class EngineOptions(Knobs):
    """What engine to start, and how."""

    engine: str | None = None
    """native (llama.cpp in a worker of ours, the default), llama-server, ik_llama, vllm, or the URL of one that runs;
    default: the configuration's."""

    machine: str | None = None
    """The machine to plan for: this, a catalogue name or a machine file; default: the configuration's, else this."""

    binary: str | None = None
    """The server's program; default: the configuration's, else the one on PATH or, for llama-server, the wheel's."""

    port: int | None = None
    """Where `serve` listens; with --engine-only and elsewhere, where a server engine does. Default: the
    configuration's, else 8181 and 8180."""

    warm: Annotated[bool | None, Parameter(negative="--no-warm")] = None
    """Fill the page cache and decode once before the engine counts as ready; default: yes."""

    point: Annotated[bool, Parameter(negative="--no-point")] = True
    """Use the operating point that tokenmill tune found, for what is not said here; default: yes."""

    def engine_config(self, config: Config) -> EngineConfig:
        """The configuration's engine with what was said here."""
        kind = self.engine or config.engine.kind
        if kind not in KINDS and "://" not in kind:
            raise UsageError(f"no engine {kind!r} is known", hint=f"{', '.join(KINDS)}, or a URL")
        given = config.engine
        return replace(
            given,
            kind=kind,
            binary=given.binary if self.binary is None else self.binary,
            port=given.port if self.port is None else self.port,
            warm=given.warm if self.warm is None else self.warm,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model with its plan and how to run it."""

    plan: Plan
    model_path: Path
    config: EngineConfig
    tuned: bool = False  # an operating point is in force: nothing needs to be measured again


def planned(model: str, options: EngineOptions, common: Common) -> Wanted:
    """Plan for a model whose files are here; UnknownModel or UsageError where they are not."""
    config = common.load_config()
    engine = options.engine_config(config)
    if engine.kind not in KINDS:
        raise UsageError(
            f"{engine.kind} runs already: nothing is to be planned for it",
            hint=f"tokenmill run JOBS --engine {engine.kind} uses it as it is",
        )
    place = where(model, common)
    if is_url(place) or (catalog.looks_like_name(place) and not Path(place).exists()):
        raise UnknownModel(
            f"{model} has no files here, and an engine needs them", hint=f"tokenmill models pull {model}"
        )
    machine, profile = find(options.machine or config.machine), read(place)
    goal = options.reserving(config.reserve).goal_for(KINDS[engine.kind])
    laid = Overlaid(goal)
    if options.point:
        laid = laid_over(goal, machine, profile, Path(place), engine, config.state_path)
    plan = _chosen(machine, profile, laid.goal, engine)
    if plan.fits and (why := misplaced(plan, laid)) is not None:
        laid, plan = Overlaid(goal, why_not=why), _chosen(machine, profile, goal, engine)
    say_point(laid, fits=plan.fits)
    if laid.words is not None and not plan.fits:
        laid, plan = Overlaid(goal), _chosen(machine, profile, goal, engine)
    plan = decided(corrected(plan, config.state_path, place, engine=engine.kind), laid)
    here = (options.machine or config.machine) == THIS
    plan = replace(plan, decisions=(*plan.decisions, *decisions(plan, engine, here=here)))
    return Wanted(plan, Path(place), engine, tuned=laid.words is not None)


def _chosen(machine: Machine, profile: Profile, goal: Goal, engine: EngineConfig) -> Plan:
    """A plan with as many sequences as was asked for; where it was not, several if they fit."""

    def made(sequences: int) -> Plan:
        wanted = replace(goal, sequences=sequences)
        return make(machine, profile, native_goal(wanted) if engine.kind == "native" else wanted)

    first = made(goal.sequences or SEQUENCES)
    if first.fits or goal.sequences is not None:
        return first
    fewer = made(1)
    return fewer if fewer.fits else first


@contextmanager
def load_shown() -> Iterator[Callable[[LoadProgress | WarmProgress], None]]:
    """A bar for a load and its warm-up on stderr; lines now and then where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _noted(_Lines().tell)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None, words="")
        yield _noted(lambda now: _draw(progress, task, now))


def _noted(tell: Callable[[LoadProgress | WarmProgress], None]) -> Callable[[LoadProgress | WarmProgress], None]:
    """What is said of a start before there are bytes to count stays on the screen, each once."""
    said: set[str] = set()

    def told(now: LoadProgress | WarmProgress) -> None:
        if not isinstance(now, LoadProgress) or now.phase != "starting" or now.bytes_total or now.detail is None:
            tell(now)
        elif now.detail not in said:
            said.add(now.detail)
            say(now.detail)

    return told


def _draw(progress: Progress, task: TaskID, now: LoadProgress | WarmProgress) -> None:
    title, share, words = described(now)
    progress.update(task, description=title, words=words, total=None if share is None else 1.0, completed=share or 0.0)


class _Lines:
    """Progress as lines: one for each stage, and one for each tenth of a long one."""

    def __init__(self) -> None:
        self._title, self._said = "", 0.0

    def tell(self, now: LoadProgress | WarmProgress) -> None:
        title, share, words = described(now)
        if title != self._title or (share or 0.0) >= self._said + _STEP_SAID:
            self._title, self._said = title, share or 0.0
            say(f"{title} {words}".rstrip())


class Findings:
    """Why a load is slow, each said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def tell(self, found: Sequence[Finding]) -> None:
        """Say what is new."""
        for finding in found:
            if finding.text not in self._said:
                self._said.add(finding.text)
                say(finding.text + (f"\nhint: {finding.hint}" if finding.hint else ""))


def described(now: LoadProgress | WarmProgress) -> tuple[str, float | None, str]:
    """What is being done, how far it is, and the figures."""
    title: str
    if isinstance(now, LoadProgress):
        title, done, total, share = now.phase, now.bytes_loaded, now.bytes_total, now.share
        sizes = done is not None and total is not None
    else:
        title, done, total = now.step, now.done, now.total
        share = done / total if done is not None and total else None
        sizes = now.step == "page cache" and share is not None
    parts = [now.detail or ""]
    if sizes and done is not None and total is not None:
        parts.append(f"{format_bytes(done)} of {format_bytes(total)}")
    if now.rate_bytes_s:
        parts.append(f"{format_bytes(round(now.rate_bytes_s))}/s")
    if now.eta_s:
        parts.append(f"{format_seconds(now.eta_s)} left")
    return title, share, ", ".join(part for part in parts if part)
