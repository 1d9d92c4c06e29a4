"""Signals to a command that works for long: the first asks, the second insists."""

import asyncio
import os
import signal
import sys

from tokenmill.cli.output import say
from tokenmill.jobs import hurry

_SHOW_CURSOR = "\x1b[?25h"


class Stop:
    """The first signal asks the work to stop, or ends the loading before it; the second ends the process at once."""

    def __init__(self) -> None:
        self.event, self.code = asyncio.Event(), 0
        self._loading = asyncio.current_task()
        hurry.over()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._asked, number)

    def loaded(self) -> None:
        """From now on there is work that can be stopped."""
        self._loading = None

    def _asked(self, number: signal.Signals) -> None:
        if self.code:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
            os._exit(128 + number)
        self.code = 128 + number
        self.event.set()
        hurry.ask(self.code)  # a store whose server is away
        if self._loading is not None:
            self._loading.cancel()
        say("stopping; once more ends it at once")
