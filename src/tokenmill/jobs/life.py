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


def of(engine: Engine) -> Engine | None:
    """The life that an engine has now; None: none."""
    return engine.current if isinstance(engine, Watched) else engine


async def goes_on(engine: Engine, life: Engine | None) -> bool:
    """Whether an engine that broke one request off is the same as before, and there for others."""
    same = life is not None and of(engine) is life and over(engine) is None
    return same and (await engine.status()).state == "ready"
