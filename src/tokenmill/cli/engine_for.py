"""The engine that a batch runs on: one that runs already, one behind a URL, or one that is started for it alone."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.cli.named import where
from tokenmill.cli.output import Common, byte_progress, say
from tokenmill.cli.starting import KINDS, EngineOptions, Findings, Wanted, load_shown, planned
from tokenmill.config import Config, EngineConfig
from tokenmill.engine import records
from tokenmill.engine.bring_up import bring_up
from tokenmill.engine.engine import Engine, Identity
from tokenmill.engine.records import Record
from tokenmill.engine.start import adopt, attach
from tokenmill.errors import EngineError, UsageError
from tokenmill.model.identity import identity_of
from tokenmill.units import format_seconds, number_of

DEFAULT_MODEL = "smollm2"
_OWN = "run-"  # engines that end with the run that started them
_LEAVING_S = 60.0  # for the engine of a run that was killed
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen; one of `record`, `url` and `wanted` says how to get it."""

    model_id: str
    model: str  # as people call it
    config: EngineConfig
    state: Path
    record: Record | None = None
    url: str | None = None
    path: Path | None = None


def choose(model: str | None, options: EngineOptions, common: Common) -> Choice:
    """The engine for a model and what was said of it; starts nothing, but may pull the default model."""
    config = common.load_config()
    said = options.engine or config.engine.kind
    running = records.listed(config.state_path)
    if "://" in said:
        engine = options.engine_config(config)
        identity = asyncio.run(_learn(said, engine, model))
        return Choice(identity.model_id, identity.model, engine, config.state_path, url=said)
    if said not in KINDS:
        return _named(said, running, model, config, common)
    engine = options.engine_config(config)
    path = model_path(model, config, common)
    model_id = identity_of(path)
    # Whoever says how the engine is to be wants one of their own.
    usual = options == EngineOptions(engine=options.engine)
    same = [record for record in running if record.model_id == model_id and not record.name.startswith(_OWN)]
    found = next((record for record in same if options.engine in (None, record.kind)), None) if usual else None
    return Choice(model_id, model or DEFAULT_MODEL, engine, config.state_path, record=found, path=path)


def plan_for(choice: Choice, options: EngineOptions, common: Common) -> Wanted:
    """The plan for an engine that has to be started."""
    return planned(str(choice.path), replace(options, engine=choice.config.kind), common)


@asynccontextmanager
async def engine_up(choice: Choice, wanted: Wanted | None, folder: Path) -> AsyncIterator[Engine]:
    """The engine, ready, and afterwards ended if it was started here. `folder`: of the store it works for."""
    if choice.record is not None:
        record = choice.record
        engine: Engine | None = await adopt(choice.state, record.name)
        if engine is None:
            raise EngineError(f"engine {record.name} has ended", hint="the same command starts one of its own")
        say(f"engine: {record.name}, which runs already as process {record.engine.pid}; {_words(engine.identity)}")
    elif choice.url is not None:
        engine = await attach(choice.url, choice.config, model=choice.model)
        say(f"engine: {engine.identity.address}, {engine.identity.model}; {_words(engine.identity)}")
    elif wanted is not None:
        engine = await _started(choice, wanted, folder)
    else:
        raise AssertionError("an engine that is to be started needs a plan")
    try:
        yield engine
    finally:
        await engine.close()


async def _started(choice: Choice, wanted: Wanted, folder: Path) -> Engine:
    name = _OWN + hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:8]
    await _predecessor_gone(choice.state, name)
    with load_shown() as tell:
        up = await bring_up(
            wanted.plan, model_path=wanted.model_path, config=wanted.config, state=choice.state, name=name, tell=tell,
            slow=Findings().tell,
        )  # fmt: skip
    say(f"engine: {up.engine.identity.build}, loaded in {format_seconds(up.load_s)}; {_words(up.engine.identity)}")
    return up.engine


async def _predecessor_gone(state: Path, name: str) -> None:
    """The engine of a run that was killed leaves by itself; another could not take its name before."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _LEAVING_S
    while (left := records.read(state, name)) is not None and left.alive and loop.time() < until:
        await asyncio.sleep(_POLL_S)


def _words(identity: Identity) -> str:
    lanes = number_of(identity.lanes, "lane") if identity.lanes is not None else "it does not say how many lanes it has"
    return lanes + (f" of {identity.context:,} tokens" if identity.context is not None else "")


async def _learn(url: str, config: EngineConfig, model: str | None) -> Identity:
    engine = await attach(url, config, model=model)
    try:
        return engine.identity
    finally:
        await engine.close()


def _named(
    name: str, running: tuple[Record, ...], model: str | None, config: Config, common: Common
) -> Choice:  # fmt: skip
    record = next((record for record in running if record.name == name), None)
    if record is None:
        here = ", ".join(record.name for record in running) or "none"
        raise UsageError(
            f"no engine {name!r} is known or runs here", hint=f"{', '.join(KINDS)}, a URL, or one that runs: {here}"
        )
    if model is not None and identity_of(where(model, common)) != record.model_id:
        raise UsageError(f"engine {name} runs {record.model}, not {model}", hint="leave --model out, or use another")
    engine = replace(config.engine, kind=record.kind)
    return Choice(record.model_id, record.model, engine, config.state_path, record=record)


def model_path(model: str | None, config: Config, common: Common) -> Path:
    """Where a model's file is; without a model, the default one, pulled if it is not here."""
    if model is not None:
        return Path(where(model, common))
    from tokenmill.model.pull import pull  # noqa: PLC0415  an HTTP client, and only without a model

    with byte_progress() as bars:
        task = bars.add_task(DEFAULT_MODEL, start=False, visible=False)

        def told(done: int, total: int | None) -> None:
            bars.start_task(task)
            bars.update(task, completed=done, total=total, visible=True)

        pulled = pull(DEFAULT_MODEL, models_path=config.models_path, keep_free_bytes=config.pull.keep_free_bytes,
                      progress=told, notify=say)  # fmt: skip
    say(f"no --model was given: using {DEFAULT_MODEL}" + ("" if pulled.was_here else ", which has just been pulled"))
    return pulled.path
