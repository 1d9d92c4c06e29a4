"""`tokenmill serve`: serves models over HTTP, or runs one engine without the gateway (--engine-only)."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.engines.choose import watch_engine
from tokenmill.api.engines.single import PlannedEngine, planned_engine, started
from tokenmill.cli.options import EngineFlags, ModelArgument
from tokenmill.cli.output import Common, show, show_json
from tokenmill.cli.progress import load_shown
from tokenmill.cli.signals import CancelOnSignals, served_code
from tokenmill.cli.views.serve import document, engine_facts
from tokenmill.errors import UsageError


def serve(
    model: ModelArgument = None,
    *,
    engine_only: bool = False,
    detach: bool = False,
    name: Annotated[str | None, Parameter(metavar="NAME")] = None,
    host: Annotated[str | None, Parameter(metavar="ADDRESS")] = None,
    digest: Annotated[tuple[Path, ...], Parameter(metavar="FILE")] = (),
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Serve models over an OpenAI-compatible HTTP API, with a dashboard.

    Plans, loads and warms up the engine of MODEL, or every engine in the configuration, and restarts engines that
    crash. Interactive requests run before batch jobs. Listens on 127.0.0.1; any other address requires an API key
    (`tokenmill keys add`). Ctrl-C waits for requests in flight; a second Ctrl-C quits immediately.

        tokenmill serve kimi.gguf --context 32k
        tokenmill serve --config tokenmill.toml --host 0.0.0.0
        tokenmill serve kimi.gguf --engine-only --detach

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model. [default: the engines in the configuration,
        or smollm2]
    engine_only:
        Run one engine without the gateway, on its own URL or socket, and compare its memory with the plan.
    detach:
        With --engine-only: leave the engine running in the background; stop it with `tokenmill engines stop`.
    name:
        Name of the engine. [default: derived from the model]
    host:
        Address on which the gateway listens. [default: from the configuration, or 127.0.0.1]
    digest:
        File with a system message that many requests will share, as written by `tokenmill digest`; may be repeated. It
        is computed before the engine is ready and stays cached; the native engine also saves it for the next start.
    """
    if not engine_only:
        if detach:
            raise UsageError("--detach requires --engine-only", hint="add --engine-only, or omit --detach")
        from tokenmill.cli.serving.serve_gateway import gateway  # noqa: PLC0415  its packages are slow to import

        return gateway(model, name, host, digest, options, common)
    if model is None:
        raise UsageError("--engine-only requires a model", hint="for example: tokenmill serve --engine-only smollm2")
    if host is not None:
        raise UsageError(
            "--host cannot be combined with --engine-only",
            hint="set engine.host in the configuration to change the address of a server engine",
        )
    engine = planned_engine(model, options, common.load_config(), name=name, digests=digest)
    signals = CancelOnSignals()
    try:
        asyncio.run(_serve(engine, detach, common, signals))
    except asyncio.CancelledError:
        return served_code(signals.code)
    return 0


async def _serve(engine: PlannedEngine, detach: bool, common: Common, signals: CancelOnSignals) -> None:
    signals.begin()
    async with AsyncExitStack() as stack:
        with load_shown() as on_progress:
            up = await stack.enter_async_context(started(engine, on_progress, detach=detach))
        if common.json:
            show_json(document(engine.name, up))
        else:
            show(*engine_facts(engine.name, up, detach=detach))
        if not detach:
            await watch_engine(up.engine)
