"""Watches whether the engine is up, restarting, or has failed permanently."""

import asyncio
from collections.abc import Callable

from tokenmill.engine.engine import Engine, EngineStatus
from tokenmill.errors import EngineError
from tokenmill.units import format_seconds

POLL_S = 1.0
MAX_SILENCE_S = 600.0  # an external server that is unreachable for longer has failed


def failure(engine: Engine) -> EngineError | None:
    """The permanent failure of an engine; None if it is up or may come back."""
    return engine.ended.result() if engine.ended.done() else None


async def watch(
    engine: Engine,
    on_event: Callable[[EngineStatus | EngineError], None],
    *,
    poll_s: float = POLL_S,
    max_silence_s: float = MAX_SILENCE_S,
) -> None:
    """Report the engine's status periodically; return after reporting a permanent failure."""
    loop = asyncio.get_running_loop()
    silent_since_s: float | None = None
    while (failed := failure(engine)) is None:
        status = await engine.status()
        on_event(status)
        silent_since_s = None if status.state != "failed" else (silent_since_s or loop.time())
        if silent_since_s is not None and loop.time() - silent_since_s > max_silence_s:
            address = engine.identity.address
            failed = EngineError(
                f"the engine at {address} has not responded for {format_seconds(max_silence_s)}: {status.detail}",
                hint="check that the server is running and reachable",
            )
            break
        await asyncio.sleep(poll_s)
    on_event(failed)


async def survived(engine: Engine, generation: int) -> bool:
    """Whether the engine process of this generation, which failed a request, still accepts requests."""
    same = engine.generation == generation and failure(engine) is None
    return same and (await engine.status()).state == "ready"
