"""Whether the engine under a batch lives, comes back, or is gone for good."""

import asyncio
from collections.abc import Callable

from tokenmill.engine.engine import Engine, Status
from tokenmill.engine.watched import Watched
from tokenmill.errors import EngineError
from tokenmill.units import format_seconds

LOOK_S = 1.0
PATIENCE_S = 600.0  # with a server that is not ours and does not answer


def over(engine: Engine) -> EngineError | None:
    """Why an engine will not come back; None: it may."""
    if isinstance(engine, Watched):
        return engine.failed.result() if engine.failed.done() else None
    died = getattr(engine, "died", None)
    return died.result() if isinstance(died, asyncio.Future) and died.done() else None


async def watch(
    engine: Engine,
    tell: Callable[[Status | EngineError], None],
    *,
    look_s: float = LOOK_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Tell how an engine is again and again, and at last why it is gone for good."""
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


async def answers(engine: Engine) -> bool:
    """Whether an engine that broke one request off goes on with others."""
    return over(engine) is None and (await engine.status()).state == "ready"
