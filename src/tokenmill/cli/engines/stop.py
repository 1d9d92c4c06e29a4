"""`tokenmill engines stop`: stops a running engine."""

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
    """Stop an engine and its child processes.

    They are sent SIGTERM first, and SIGKILL after ten seconds.

        tokenmill engines stop kimi

    Parameters
    ----------
    name:
        Name of the engine, as shown by `tokenmill engines list`.
    """
    state = common.load_config().state_path
    asyncio.run(_stop(state, name))
    if common.json:
        show_json({"stopped": name})
    else:
        say(f"stopped {name}")


async def _stop(state: Path, name: str) -> None:
    found = {record.name: record for record in registry.listed(state)}
    if name not in found:
        known = f"running: {', '.join(found)}" if found else "no engines are running"
        raise UsageError(f"no running engine named {name}", hint=known)
    record = found[name]
    process = Process(record.engine, record.supervisor, Path(record.log))
    if record.supervisor.alive:
        await process.stop()
    else:
        record.engine.send(signal.SIGTERM)
        await process.wait()
    registry.forget(state, record)
