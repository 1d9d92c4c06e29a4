"""`tokenmill engines stop`: end an engine that runs here."""

import asyncio
import signal
from pathlib import Path

from tokenmill.cli.output import Common, say, show_json
from tokenmill.engine.process import registry
from tokenmill.engine.process.process import Process
from tokenmill.errors import UsageError


def stop(
    name: str,
    /,
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Stop an engine: asked to leave first, killed after ten seconds, with everything it started.

    Parameters
    ----------
    name:
        Its name, as `tokenmill engines` shows it.
    """
    state = common.load_config().state_path
    asyncio.run(_stop(state, name))
    if common.json:
        show_json({"stopped": name})
    else:
        say(f"{name} has stopped")


async def _stop(state: Path, name: str) -> None:
    found = {record.name: record for record in registry.listed(state)}
    if name not in found:
        known = f"running: {', '.join(found)}" if found else "none runs; tokenmill engines lists them"
        raise UsageError(f"no engine {name} runs here", hint=known)
    record = found[name]
    process = Process(record.engine, record.minder, Path(record.log))
    if record.minder.alive:
        await process.stop()
    else:
        record.engine.send(signal.SIGTERM)
        await process.wait()
    registry.forget(state, record)
