"""The engine that a batch runs on: one that is running, one behind a URL, or one that is started for it.

`choose_engine` decides without starting anything; `open_engine` yields the engine, ready for requests, and stops it if
it was started for the run.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.api.background import Background
from tokenmill.api.options import ENGINES, EngineOptions, dialect_of, engine_name
from tokenmill.api.planning.plan import EnginePlan, ReadBatch, locate, plan_engine
from tokenmill.api.progress import Download, OnProgress, ignore, log
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.engine import Engine, Identity
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.process import registry
from tokenmill.engine.process.registry import Record
from tokenmill.engine.start import attach
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import EngineError, UsageError
from tokenmill.hardware.catalog import THIS
from tokenmill.launch import Finding
from tokenmill.launch.files.launch import slug
from tokenmill.model.identity import identity_of
from tokenmill.native.launching import ReadyEngine, adopt, launch_engine
from tokenmill.units import format_seconds, number_of

DEFAULT_MODEL = "smollm2"
_OWN = "run-"  # name prefix of engines that end with the run that started them
_PREDECESSOR_EXIT_S = 60.0
_POLL_S = 0.05
_STATUS_S = 0.5  # polling interval of a running engine


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine to use: `record` is a running one, `url` a server, `path` a model to start one for."""

    model_id: str
    model: str  # as the user named it
    config: EngineConfig
    state: Path
    record: Record | None = None
    url: str | None = None
    path: Path | None = None
    dry_run: bool = False  # it is planned and never started: any machine, and models without files here

    @property
    def starts(self) -> bool:
        """Whether an engine has to be started."""
        return self.record is None and self.url is None


def choose_engine(
    model: str | None,
    options: EngineOptions,
    config: Config,
    on_progress: OnProgress = ignore,
    *,
    dry_run: bool = False,
) -> EngineChoice:
    """The engine for a model and options. Starts nothing, but downloads the default model if it is missing.

    `dry_run`: it will not be started, so its model's files need not be here.
    """
    asked = engine_name(options.engine or config.engine.kind)
    running = registry.listed(config.state_path)
    if "://" in asked:
        engine = options.engine_config(config)
        with Background() as background:  # the calling thread may run an event loop, as in a notebook
            identity = background.run(_identity_at(asked, engine, model))
        return EngineChoice(identity.model_id, identity.model, engine, config.state_path, url=asked)
    if asked not in ENGINES:
        return _running(options.engine or asked, running, model, config)
    engine = options.engine_config(config)
    path = model_path(model, config, on_progress)
    model_id = f"not downloaded: {model}" if dry_run and not path.exists() else identity_of(path)
    found = None
    if options.is_default and not (dry_run and config.machine != THIS):  # a running engine may have other options
        same = [record for record in running if record.model_id == model_id and not record.name.startswith(_OWN)]
        found = next((record for record in same if options.engine is None or record.kind == asked), None)
    name = model or DEFAULT_MODEL
    choice = EngineChoice(model_id, name, engine, config.state_path, record=found, path=path, dry_run=dry_run)
    if choice.starts:
        options.goal_for(dialect_of(engine))  # refuse contradicting options before anything is stored
    return choice


def plan_for(
    choice: EngineChoice, options: EngineOptions, config: Config, batch: ReadBatch | None = None
) -> EnginePlan:
    """The plan of the engine that a choice starts, for a batch if it is given; DoesNotFit if it does not fit."""
    options = replace(options, engine=choice.config.kind)
    return plan_engine(str(choice.path), options, config, files=not choice.dry_run, batch=batch).require_fit()


def model_path(model: str | None, config: Config, on_progress: OnProgress = ignore) -> Path:
    """The path of a model; without one, the default model, downloaded if it is missing."""
    if model is not None:
        return Path(locate(model, config))
    from tokenmill.model.pull import pull  # noqa: PLC0415  imports an HTTP client

    pulled = pull(
        DEFAULT_MODEL,
        models_path=config.models_path,
        keep_free_bytes=config.pull.keep_free_bytes,
        progress=lambda done, total: on_progress(Download(DEFAULT_MODEL, done, total)),
        notify=log.info,
    )
    log.info("no model was given: using %s%s", DEFAULT_MODEL, "" if pulled.was_here else ", downloaded just now")
    return pulled.path


@asynccontextmanager
async def open_engine(
    choice: EngineChoice, planned: EnginePlan | None, folder: Path, on_progress: OnProgress = ignore
) -> AsyncIterator[Engine]:
    """The engine, ready for requests; an engine that is started here is stopped at the end.

    `folder`: the folder of the store. The engine's name derives from it, so that the engine of a killed run is found.
    """
    if choice.record is not None:
        record = choice.record
        engine: Engine | None = await adopt(choice.state, record.name)
        if engine is None:
            raise EngineError(
                f"engine {record.name} is not running any more", hint="run the command again to start one"
            )
        log.info("engine: %s, running as process %s; %s", record.name, record.engine.pid, _size(engine.identity))
    elif choice.url is not None:
        engine = await attach(choice.url, choice.config, model=choice.model)
        log.info("engine: %s, %s; %s", engine.identity.address, engine.identity.model, _size(engine.identity))
    elif planned is not None:
        engine = await _started(choice, planned, folder, on_progress)
    else:
        raise AssertionError("an engine that has to be started needs a plan")
    try:
        yield engine
    finally:
        await engine.close()


async def start_planned(planned: EnginePlan, state: Path, name: str, on_progress: OnProgress) -> ReadyEngine:
    """Start a plan's engine, after a killed predecessor with the same name has exited."""
    await _wait_for_predecessor(state, name)

    def progress(event: LoadProgress | WarmProgress) -> None:
        on_progress(event)

    return await launch_engine(
        planned.plan,
        model_path=planned.model_path,
        config=planned.config,
        state=state,
        name=name,
        tell=progress,
        slow=SlowLoad().report,
    )


def name_after(model: str, planned: EnginePlan) -> str:
    """The default name of an engine: the name of a pulled model, else the name in the model file."""
    is_name = "/" not in model and not Path(model).exists()
    return slug(model if is_name else planned.plan.profile.name).lower()


async def watch_engine(engine: Engine, name: str | None = None) -> None:
    """Log the crashes and restarts of an engine; raise its error when it is not restarted any more.

    `name` precedes every message if there are several engines.
    """
    prefix = "" if name is None else f"engine {name}: "
    before = "ready"
    while not engine.ended.done():
        await asyncio.wait({engine.ended}, timeout=_STATUS_S)
        status = await engine.status()
        if status.state == before:
            continue
        log.info("%s%s", prefix, f"{status.state}: {status.detail}" if status.detail else status.state)
        if status.state == "restarting" and engine.last_error is not None and engine.last_error.hint:
            log.info(engine.last_error.hint)
        before = status.state
    raise engine.ended.result()


class SlowLoad:
    """Logs why a load is slow, each reason once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, findings: Sequence[Finding]) -> None:
        """Log the findings that have not been logged."""
        for finding in findings:
            if finding.text not in self._logged:
                self._logged.add(finding.text)
                log.info(finding.text + (f"\nhint: {finding.hint}" if finding.hint else ""))


async def _started(choice: EngineChoice, planned: EnginePlan, folder: Path, on_progress: OnProgress) -> Engine:
    name = _OWN + hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:8]
    up = await start_planned(planned, choice.state, name, on_progress)
    identity = up.engine.identity
    log.info("engine: %s, loaded in %s; %s", identity.build, format_seconds(up.load_s), _size(identity))
    return up.engine


async def _wait_for_predecessor(state: Path, name: str) -> None:
    """Wait until the engine of a killed run, which stops by itself, has freed its name."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _PREDECESSOR_EXIT_S
    while (left := registry.read(state, name)) is not None and left.alive and loop.time() < until:
        await asyncio.sleep(_POLL_S)


def _size(identity: Identity) -> str:
    slots = number_of(identity.slots, "slot") if identity.slots is not None else "unknown number of slots"
    return slots + (f" of {identity.context:,} tokens" if identity.context is not None else "")


async def _identity_at(url: str, config: EngineConfig, model: str | None) -> Identity:
    engine = await attach(url, config, model=model)
    try:
        return engine.identity
    finally:
        await engine.close()


def _running(name: str, running: Sequence[Record], model: str | None, config: Config) -> EngineChoice:
    """The running engine of a name."""
    record = next((record for record in running if record.name == name), None)
    if record is None:
        there = ", ".join(record.name for record in running) or "none"
        raise UsageError(
            f"no engine {name!r}",
            hint=f"use {', '.join(ENGINES)}, a URL, or a running engine (running: {there})",
        )
    if model is not None and identity_of(locate(model, config)) != record.model_id:
        raise UsageError(
            f"engine {name} runs {record.model}, not {model}", hint="leave out the model, or use another engine"
        )
    engine = replace(config.engine, kind=record.kind)
    return EngineChoice(record.model_id, record.model, engine, config.state_path, record=record)
