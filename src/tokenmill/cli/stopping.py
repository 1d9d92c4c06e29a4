"""Stopping a command that runs for long: the first signal stops the work, the second one exits immediately."""

import asyncio
import os
import signal
import sys

from tokenmill.api.stopping import Stop
from tokenmill.cli.output import say
from tokenmill.cli.signals import exit_code, on_stop_signals

_SHOW_CURSOR = "\x1b[?25h"


class SignalStop(Stop):
    """A stop that signals request; `code` is the exit code then. The second signal ends the process immediately."""

    def __init__(self) -> None:
        super().__init__()
        self.code = 0

    def begin(self) -> None:
        """Handle signals in the running event loop from now on."""
        super().begin()
        on_stop_signals(self._received)

    def _received(self, number: signal.Signals) -> None:
        if self.code:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
            os._exit(exit_code(number))
        self.code = exit_code(number)
        say(f"stopping ({number.name}); a second signal ends it immediately")
        self.request(self.code)


class CancelOnSignals:
    """Cancels a task when a signal asks the command to end; `code` is the exit code then."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._task: asyncio.Task[object] | None = None

    def begin(self) -> None:
        """From now on signals cancel the current task."""
        self._task = asyncio.current_task()
        on_stop_signals(self._received)

    def _received(self, number: signal.Signals) -> None:
        self.code = exit_code(number)
        if self._task is not None:
            self._task.cancel()
