"""Signals that end a command: SIGINT, SIGTERM, SIGHUP and SIGQUIT.

Long-running commands handle them in their event loop (`on_stop_signals`) and shut down gracefully. Elsewhere they raise
`Signalled`, as Ctrl-C raises KeyboardInterrupt. The exit code is 128 plus the signal's number. SIGHUP and SIGQUIT stay
ignored if they were ignored when the command started: nohup does that, and shells do it for background jobs.
"""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from tokenmill.api.stopping import Stop

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
_left = False  # whether a terminal was gone


class Signalled(KeyboardInterrupt):
    """A signal other than SIGINT asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


def raise_on_signals() -> None:
    """Make SIGTERM, SIGHUP and SIGQUIT raise `Signalled` in the main thread unless they are ignored."""

    def received(number: int, _frame: FrameType | None) -> None:
        _leave_terminal(number)
        raise Signalled(number)

    for number in (signal.SIGTERM, *_UNLESS_IGNORED):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, received)


def on_stop_signals(handler: Callable[[signal.Signals], None]) -> None:
    """Call `handler` in the running event loop whenever a signal asks the command to end."""
    import asyncio  # noqa: PLC0415  commands without an event loop start faster

    def received(number: signal.Signals) -> None:
        _leave_terminal(number)
        handler(number)

    for number in (*_ALWAYS, *_UNLESS_IGNORED):
        if number in _ALWAYS or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, received, number)


def exit_code(number: int) -> int:
    """The exit code of a command that a signal ended."""
    return 128 + number


def served_code(code: int | None) -> int:
    """The exit code of a server that a signal stopped: 0 for SIGTERM and Ctrl-C, the usual ways to stop one."""
    return 0 if code in (None, exit_code(signal.SIGINT), exit_code(signal.SIGTERM)) else code


def leave_lost_terminal() -> bool:
    """Discard output to a terminal that is gone, because every write to it fails; return whether one was gone."""
    global _left  # noqa: PLW0603  the streams are global too
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                _left = True
    return _left


def _leave_terminal(number: int) -> None:
    if number == signal.SIGHUP:
        leave_lost_terminal()


_SHOW_CURSOR = "\x1b[?25h"


class SignalStop(Stop):
    """A stop requested by a signal, which sets `code`, the exit code. A second signal ends the process immediately."""

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
        from tokenmill.cli.output import say  # noqa: PLC0415  `tokenmill --help` starts in half the time without it

        say(f"stopping ({number.name}); press Ctrl-C again to quit immediately")
        self.request(self.code)


class CancelOnSignals:
    """Cancels a task on a signal, which sets `code`, the exit code."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._task: asyncio.Task[object] | None = None

    def begin(self) -> None:
        """Make signals cancel the current task from now on."""
        self._task = asyncio.current_task()
        on_stop_signals(self._received)

    def _received(self, number: signal.Signals) -> None:
        self.code = exit_code(number)
        if self._task is not None:
            self._task.cancel()
