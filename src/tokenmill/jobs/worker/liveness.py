"""Whether the engine of a batch is up, restarting, or has failed permanently."""

import asyncio
from collections.abc import Callable

from tokenmill.engine.engine import Engine, EngineStatus
from tokenmill.errors import EngineError
from tokenmill.units import format_seconds

LOOK_S = 1.0
PATIENCE_S = 600.0  # for an external server that does not answer


def over(engine: Engine) -> EngineError | None:
    """Why an engine has failed permanently; None if it is up or may come back."""
    return engine.ended.result() if engine.ended.done() else None


async def watch(
    engine: Engine,
    tell: Callable[[EngineStatus | EngineError], None],
    *,
    look_s: float = LOOK_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Report the engine's status periodically, and finally why it failed permanently."""
    loop = asyncio.get_running_loop()
    silent_since_s: float | None = None
    while (gone := over(engine)) is None:
        status = await engine.status()
        tell(status)
        silent_since_s = None if status.state != "failed" else (silent_since_s or loop.time())
        if silent_since_s is not None and loop.time() - silent_since_s > patience_s:
            address = engine.identity.address
            gone = EngineError(
                f"the engine at {address} has not answered for {format_seconds(patience_s)}: {status.detail}",
                hint="see whether the server runs",
            )
            break
        await asyncio.sleep(look_s)
    tell(gone)


async def survived(engine: Engine, generation: int) -> bool:
    """Whether the process that failed a request of this generation still accepts others."""
    same = engine.generation == generation and over(engine) is None
    return same and (await engine.status()).state == "ready"
