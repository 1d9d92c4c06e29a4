"""The gateway as a command: which engines, the words while they load, and the lines of its log."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from socket import socket
from typing import Any

import uvloop

from tokenmill.cli.engine_for import DEFAULT_MODEL, model_path
from tokenmill.cli.output import Common, facts, jsonable, say, show, show_json
from tokenmill.cli.plan_view import render
from tokenmill.cli.serve import DOES_NOT_FIT, counted, held_words, named_after, stay
from tokenmill.cli.starting import EngineOptions, Findings, Wanted, load_shown, planned
from tokenmill.config import Config, DigestEntry, EngineEntry
from tokenmill.engine.engine import Engine
from tokenmill.engine.heads import Head, digest_in
from tokenmill.engine.watched import Watched
from tokenmill.errors import EngineError, TokenmillError, UsageError
from tokenmill.gateway.away import Away
from tokenmill.gateway.listening import bind
from tokenmill.gateway.serving import EngineWanted, engines_up, may_listen, serve, state_for
from tokenmill.gateway.state import GatewayState, Log
from tokenmill.units import format_seconds


class DoesNotFit(Exception):
    """A plan that does not fit, to be shown."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self.wanted = wanted


def gateway(
    model: str | None,
    name: str | None,
    host: str | None,
    digest: tuple[Path, ...],
    options: EngineOptions,
    common: Common,
) -> int:
    """Serve until told to stop."""
    config = _configured(common.load_config(), host, options.port, digest)
    may_listen(config)
    listening = bind(config.gateway)
    with listening:
        try:
            wanted = _wanted(model, name, replace(options, port=None), config, common)
        except DoesNotFit as error:
            show(*render(error.wanted.plan))
            return DOES_NOT_FIT
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(wanted, config, listening, common))
    return 0


def _configured(config: Config, host: str | None, port: int | None, digests: tuple[Path, ...]) -> Config:
    """The configuration with what was said on the command line."""
    settings = config.gateway
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"--port {port} is none", hint="1 to 65535, or 0 for any that is free")
    settings = replace(
        settings, host=settings.host if host is None else host, port=settings.port if port is None else port
    )
    said = tuple(DigestEntry(path.name, str(path)) for path in digests)
    try:
        return replace(config, gateway=settings, digests=(*config.digests, *said))
    except ValueError as error:
        raise UsageError(str(error)) from error


# ---- which engines


def _wanted(
    model: str | None, name: str | None, options: EngineOptions, config: Config, common: Common
) -> list[EngineWanted]:
    if model is not None or not config.engines:
        return [_single(model, name, options, config, common)]
    if options != EngineOptions() or name is not None:
        raise UsageError(
            "the configuration lists engines, each with settings of its own",
            hint="leave --name and the engine's options out, or name one model",
        )
    return [_entry(entry, config, common) for entry in config.engines]


def _single(
    model: str | None, name: str | None, options: EngineOptions, config: Config, common: Common
) -> EngineWanted:
    kind = options.engine or config.engine.kind
    heads = _heads(None, config)
    if "://" in kind:
        engine = options.engine_config(config)
        return EngineWanted(name or "upstream", (model,) if model else (), engine, url=kind, model=model, heads=heads)
    where = str(model_path(model, config, common))
    wanted = _fits(planned(where, options, common))
    called = name or named_after(model or DEFAULT_MODEL, wanted)
    heads = counted(heads, where, wanted, common) if heads else heads
    names = (called,) if model is None or "/" in model else (model, called)
    return EngineWanted(called, names, wanted.config, wanted.plan, wanted.model_path, heads=heads)


def _entry(entry: EngineEntry, config: Config, common: Common) -> EngineWanted:
    kind = entry.url or entry.kind or config.engine.kind
    engine = replace(
        config.engine, kind=kind, binary=entry.binary or config.engine.binary,
        api_key_env=entry.api_key_env or config.engine.api_key_env,
        port=config.engine.port if entry.port is None else entry.port,
    )  # fmt: skip
    heads = _heads(entry.name, config)
    if "://" in kind:
        names = (entry.model, *entry.aliases) if entry.model else entry.aliases
        return EngineWanted(entry.name, names, engine, url=kind, model=entry.model, heads=heads)
    where = str(model_path(entry.model, config, common))
    options = EngineOptions(
        context=entry.context, sequences=entry.sequences, threads=entry.threads, threads_batch=entry.threads_batch,
        cpu_only=entry.cpu_only, gpus=None if entry.gpus is None else ",".join(map(str, entry.gpus)),
        cache_type=entry.cache_type, engine=kind, binary=entry.binary, port=entry.port,
    )  # fmt: skip
    wanted = _fits(planned(where, options, common))
    heads = counted(heads, where, wanted, common) if heads else heads
    names = (entry.model or DEFAULT_MODEL, *entry.aliases)
    return EngineWanted(entry.name, names, engine, wanted.plan, wanted.model_path, heads=heads)


def _fits(wanted: Wanted) -> Wanted:
    if not wanted.plan.fits:
        raise DoesNotFit(wanted)
    return wanted


def _heads(engine: str | None, config: Config) -> tuple[Head, ...]:
    """The digests that an engine is to hold, under the names that the configuration gives them."""
    return tuple(
        replace(digest_in(Path(entry.file).expanduser()), name=entry.name)
        for entry in config.digests
        if engine is None or not entry.engines or engine in entry.engines
    )


# ---- until the end


async def _serve(wanted: list[EngineWanted], config: Config, listening: socket, common: Common) -> None:
    signals = _Signals(config.gateway.grace_s)
    failed: list[TokenmillError] = []
    async with AsyncExitStack() as stack:
        try:
            with load_shown() as tell:
                up = engines_up(wanted, config, tell=lambda name: _named(name, tell, many=len(wanted) > 1),
                                slow=Findings().tell)  # fmt: skip
                engines, ups = await stack.enter_async_context(up)
        except asyncio.CancelledError:
            raise EngineError("it was told to stop before it was ready; nothing of it is left") from None
        signals.ready = True
        state = state_for(config, engines, ups, _log(config.gateway.log))
        stack.callback(asyncio.ensure_future(_watch(engines, signals.stop, failed)).cancel)
        await serve(state, listening, stop=signals.stop, at_once=signals.at_once,
                    ready=lambda: _shown(state, common))  # fmt: skip
    say("the gateway has stopped")
    if failed:
        raise failed[0]


class _Signals:
    """SIGTERM and SIGINT: before it is ready they break the start off; then one stops it, and another at once."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.stop, self.at_once, self.ready = asyncio.Event(), asyncio.Event(), False
        self._task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        if self.stop.is_set():
            self.at_once.set()
        elif not self.ready and self._task is not None:
            self._task.cancel()
        else:
            say(f"stopping; what runs may end within {format_seconds(self._grace_s)}, a second signal ends it at once")
        self.stop.set()


def _named(name: str, tell: Callable[[Any], None], *, many: bool) -> Callable[[Any], None]:
    told = False

    def one(now: Any) -> None:
        nonlocal told
        if many and not told:
            told = True
            say(f"engine {name}:")
        tell(now)

    return one


async def _watch(
    engines: list[tuple[EngineWanted, Engine]], stop: asyncio.Event, failed: list[TokenmillError]
) -> None:  # fmt: skip
    """Say when engines die and come back; when every one of ours is gone for good, so is the gateway."""
    ours = [(engine, one.name) for one, engine in engines if isinstance(engine, Watched)]
    named = len(engines) > 1
    ends = await asyncio.gather(
        *(stay(engine, name if named else None) for engine, name in ours), return_exceptions=True
    )  # fmt: skip
    if ours and len(ours) == len(engines):
        failed.extend(end for end in ends if isinstance(end, TokenmillError))
        stop.set()


def _shown(state: GatewayState, common: Common) -> None:
    if common.json:
        show_json(_document(state))
        sys.stdout.flush()
        return
    models = state.routes.models()
    rows = {
        "url": f"{state.url}/v1",
        "page": f"{state.url}/",
        "model": "\n".join(", ".join((model.id, *model.aliases)) for model in models),
        "engine": "\n".join(_engine_words(state, backend.name) for backend in state.backends),
    }
    held = [held_words(head) for digest in state.digests for head in digest.held.values()]
    if held:
        rows["digest"] = "\n".join(held)
    keyed = bool(state.keys.all())
    rows["key"] = "needed: tokenmill keys" if keyed else "none needed on this machine"
    rows["client"] = f"OPENAI_BASE_URL={state.url}/v1 OPENAI_API_KEY={'KEY' if keyed else 'none'}"
    show(facts(rows), "", "ready; Ctrl-C lets what runs end and stops it")
    sys.stdout.flush()


def _engine_words(state: GatewayState, name: str) -> str:
    backend, up = state.backend(name), state.ups.get(name)
    if backend is None:
        return name
    engine = backend.engine
    identity, can = engine.identity, engine.capabilities
    lanes = "" if identity.lanes is None else f", {identity.lanes} lanes"
    context = "" if identity.context is None else f" of {identity.context:,} tokens"
    first = "; interactive requests go first" if can.interactive_first else ""
    loaded = "" if up is None else f"; loaded in {format_seconds(up.load_s)}"
    where = f" {identity.address}" if identity.kind == "url" else ""
    away = f"; {engine.error.message}" if isinstance(engine, Away) and engine.current is None else ""
    return f"{name}: {identity.kind}{where}{lanes}{context}{first}{loaded}{away}"


def _document(state: GatewayState) -> dict[str, Any]:
    return {
        "url": f"{state.url}/v1",
        "page": f"{state.url}/",
        "key_needed": bool(state.keys.all()),
        "models": [jsonable(model) for model in state.routes.models()],
        "engines": [
            {"name": backend.name, **jsonable(backend.engine.identity),
             "load_s": state.ups[backend.name].load_s if backend.name in state.ups else None}
            for backend in state.backends
        ],
        "digests": [
            {"name": digest.name, "engine": name, **jsonable(head)}
            for digest in state.digests for name, head in digest.held.items()
        ],
    }  # fmt: skip


def _log(form: str) -> Log | None:
    """A line for each request on stderr; values come checked from the gateway: no bodies, no keys."""
    if form == "off":
        return None

    def write(line: Mapping[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if form == "json":
            text = json.dumps({"time": at, **line})
        else:
            text = " ".join((at, *(f"{name}={_word(value)}" for name, value in line.items())))
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    return write


def _word(value: Any) -> str:
    """One word of a line; what has spaces, quotes or an equals sign in it is quoted."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(mark in text for mark in ' "=\n') else text
