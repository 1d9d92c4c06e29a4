"""`tokenmill serve`: engines that stay, and the gateway before them."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tokenmill.api.engines import watch_engine
from tokenmill.api.single_engine import PlannedEngine, planned_engine, started
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, show, show_json
from tokenmill.cli.progress import load_shown
from tokenmill.cli.signals import CancelOnSignals, served_code
from tokenmill.cli.views.serve import document, engine_facts
from tokenmill.errors import UsageError
from tokenmill.gateway.service import serve_extra


def serve(
    model: str | None = None,
    *,
    engine_only: bool = False,
    detach: bool = False,
    name: str | None = None,
    host: str | None = None,
    digest: tuple[Path, ...] = (),
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Serve models at one URL, in OpenAI's protocol, until it is stopped.

    With a model, that one; without, the engines of the configuration; without those, smollm2. Each is planned, loaded,
    warmed and watched, and started again when it dies. Interactive requests go before batches. It listens on this
    machine alone; another address needs a key (`tokenmill keys add`). Ctrl-C lets what runs end and stops it, a second
    one stops it at once; nothing is left behind.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model, such as smollm2.
    engine_only:
        Serve the engine's own interface, nothing before it: a server's URL, or the native engine's socket, which
        `tokenmill engines` and `tokenmill run` use. What it took is shown beside what the plan said.
    detach:
        With --engine-only: leave it running and come back; `tokenmill engines` shows it, `tokenmill engines stop` ends
        it.
    name:
        What to call the engine; default: after the model.
    host:
        The address to listen on; default: the configuration's, else 127.0.0.1.
    digest:
        A file whose text is the system message of many requests to come, as `tokenmill digest` writes; may be given
        several times. It is computed before the engine is ready and kept; the native engine pins it, saves it, and at
        the next start reads it back.
    """
    if not engine_only:
        if detach:
            raise UsageError("only an engine can be left running", hint="add --engine-only, or leave --detach out")
        return _gateway()(model, name, host, digest, options, common)
    if model is None:
        raise UsageError("no model given", hint="for example: tokenmill serve --engine-only smollm2")
    if host is not None:
        raise UsageError("--host is for the gateway", hint="engine.host says where a server engine listens")
    engine = planned_engine(model, options, common.load_config(), name=name, digests=digest)
    signals = CancelOnSignals()
    try:
        asyncio.run(_serve(engine, detach, common, signals))
    except asyncio.CancelledError:
        return served_code(signals.code)
    return 0


def _gateway() -> Callable[..., int]:
    with serve_extra():
        from tokenmill.cli.serve_gateway import gateway  # noqa: PLC0415  its packages are an extra
    return gateway


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
