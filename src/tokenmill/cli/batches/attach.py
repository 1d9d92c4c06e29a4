"""`tokenmill attach`: follows a batch that `tokenmill run --detach` started."""

import asyncio
import sys

from tokenmill.api import detached
from tokenmill.api.detached import DetachedRun
from tokenmill.cli.output import Common, harmless, say, show_json
from tokenmill.cli.signals import CancelOnSignals, exit_code


def attach(
    batch: str | None = None,
    /,
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Follow a batch that runs in the background, until it ends or you press Ctrl-C.

    Prints the end of its log, then its output as it is written. Ctrl-C ends only this command; the batch continues.
    The exit code is that of the run.

        tokenmill attach
        tokenmill attach batch_b4e957d3

    Parameters
    ----------
    batch:
        Name of the batch, or a prefix of it. [default: the last one that was started with --detach]
    """
    run = detached.find(common.load_config().state_path, batch)
    if common.json:
        show_json({"batch": run.batch, "pid": run.process.pid, "running": run.alive, "log": run.log})
        return 0
    signals = CancelOnSignals()
    try:
        return asyncio.run(_follow(run, signals))
    except asyncio.CancelledError:
        say(f"{run.batch} continues in the background; to stop it: kill {run.process.pid}")
        return signals.code or 0


async def _follow(run: DetachedRun, signals: CancelOnSignals) -> int:
    signals.begin()
    ended = await detached.follow(run, _write)
    if ended.signal is not None:
        say(f"{run.batch} {ended.describe()}; run the same command again to continue")
        return exit_code(ended.signal)
    return 1 if ended.code is None else ended.code


def _write(text: str) -> None:
    sys.stdout.write(harmless(text))
    sys.stdout.flush()
