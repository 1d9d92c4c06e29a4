"""`tokenmill serve` without --engine-only: starts the gateway, handles signals, and shows what it serves."""

import asyncio
import gc
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, facts, jsonable, say, show, show_json
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.signals import exit_code, on_stop_signals, served_code
from tokenmill.cli.views.serve import prefix_text
from tokenmill.errors import EngineError
from tokenmill.gateway.http.request_log import request_log
from tokenmill.gateway.prepare import PreparedGateway, ServeOptions, prepare
from tokenmill.gateway.serving import Gateway, loaded_gateway
from tokenmill.gateway.state import GatewayState
from tokenmill.units import format_seconds, number_of


def gateway(
    model: str | None,
    name: str | None,
    host: str | None,
    digest: tuple[Path, ...],
    options: EngineFlags,
    common: Common,
) -> int:
    """Serve until a signal arrives or every engine has failed; return the exit code."""
    with shown_progress() as on_progress:
        prepared = prepare(model, ServeOptions(host, name, digest, options), common.load_config(), on_progress)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(prepared, common))


async def _serve(prepared: PreparedGateway, common: Common) -> int:
    signals = _Signals(prepared.config.gateway.grace_s)
    log = request_log(prepared.config.gateway.log, _write_line)
    async with AsyncExitStack() as stack:
        stack.enter_context(prepared.resources)
        try:
            with shown_progress() as on_progress:
                loading = loaded_gateway(prepared.engines, prepared.config, on_progress, log)
                loaded = await stack.enter_async_context(loading)
        except asyncio.CancelledError:
            raise EngineError("stopped by a signal before it was ready; no engine is left running") from None
        signals.gateway = loaded

        def ready() -> None:
            _freeze_garbage()
            _shown(loaded.state, common)

        await loaded.serve(prepared.listening, ready=ready)
    say("the gateway has stopped")
    if loaded.failure is not None:
        raise loaded.failure
    return served_code(signals.code)


def _freeze_garbage() -> None:
    """Exclude what was loaded so far from garbage collections, which otherwise stop all requests for up to 0.3 s."""
    gc.collect()
    gc.freeze()


class _Signals:
    """Stops the gateway on a signal: cancels the load, or drains requests; a second signal stops immediately."""

    def __init__(self, grace_s: float) -> None:
        self.gateway: Gateway | None = None
        self.code: int | None = None
        self._grace_s = grace_s
        self._task = asyncio.current_task()
        on_stop_signals(self._received)

    def _received(self, number: signal.Signals) -> None:
        first = self.code is None
        self.code = self.code or exit_code(number)
        if self.gateway is None:
            if first and self._task is not None:
                self._task.cancel()
        elif first:
            grace = format_seconds(self._grace_s)
            say(f"stopping; waiting up to {grace} for requests in flight (press Ctrl-C again to quit immediately)")
            self.gateway.stop()
        else:
            self.gateway.stop_now()


def _shown(state: GatewayState, common: Common) -> None:
    if common.json:
        show_json(_document(state))
        sys.stdout.flush()
        return
    models = state.routes.models()
    rows = {
        "url": f"{state.url}/v1",
        "dashboard": f"{state.url}/",
        "model": "\n".join(", ".join((model.id, *model.aliases)) for model in models),
        "engine": "\n".join(_engine_words(state, backend.name) for backend in state.backends),
    }
    held = [prefix_text(result) for digest in state.digests for result in digest.held.values()]
    if held:
        rows["digest"] = "\n".join(held)
    keyed = bool(state.keys.all())
    rows["key"] = "required: tokenmill keys" if keyed else "not required on this machine"
    rows["client"] = f"OPENAI_BASE_URL={state.url}/v1 OPENAI_API_KEY={'KEY' if keyed else 'none'}"
    show(facts(rows), "", "ready; press Ctrl-C to stop (waits for requests in flight)")
    sys.stdout.flush()


def _engine_words(state: GatewayState, name: str) -> str:
    backend = state.backend(name)
    up = state.ready_engines.get(name)
    if backend is None:
        return name
    engine = backend.engine
    identity = engine.identity
    can = engine.capabilities
    slots = "" if identity.slots is None else f", {number_of(identity.slots, 'slot')}"
    context = "" if identity.context is None else f" of {identity.context:,} tokens"
    first = "; interactive requests run first" if can.interactive_first else ""
    loaded = "" if up is None else f"; loaded in {format_seconds(up.load_s)}"
    where = f" {identity.address}" if identity.kind == "url" else ""
    error = engine.last_error if engine.liveness == "unreachable" else None
    away = "" if error is None else f"; {error.message}"
    return f"{name}: {identity.kind}{where}{slots}{context}{first}{loaded}{away}"


def _document(state: GatewayState) -> dict[str, Any]:
    return {
        "url": f"{state.url}/v1",
        "page": f"{state.url}/",
        "key_needed": bool(state.keys.all()),
        "models": [jsonable(model) for model in state.routes.models()],
        "engines": [
            {
                "name": backend.name,
                **jsonable(backend.engine.identity),
                "load_s": state.ready_engines[backend.name].load_s if backend.name in state.ready_engines else None,
            }
            for backend in state.backends
        ],
        "digests": [
            {"name": digest.name, "engine": name, **jsonable(result)}
            for digest in state.digests
            for name, result in digest.held.items()
        ],
    }


def _write_line(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
