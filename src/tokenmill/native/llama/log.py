"""llama.cpp's log. Its last lines are kept, because only they explain why a call failed."""

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tokenmill.native.llama.library import Library

LOG_DEBUG = 1
LOG_ERROR = 4
LOG_CONTINUED = 5
_LOGS: "dict[Path, WeakSet[LlamaLog]]" = {}
_CALLBACKS: dict[Path, Any] = {}  # the library may call them at any time: they must outlive every user


class LlamaLog:
    """The last lines of llama.cpp's log; each complete line is passed to `sink`.

    A library has one callback, which every Log of it shares. Lines come from any thread.
    """

    def __init__(
        self, library: Library, *, keep_lines: int = 400, sink: Callable[[int, str], None] | None = None
    ) -> None:
        self._sink = sink
        self._lines: deque[tuple[int, str]] = deque(maxlen=keep_lines)
        self._lock = threading.Lock()
        self._level = LOG_DEBUG
        self._part = ""
        self._count = 0
        logs = _LOGS.setdefault(library.path, WeakSet())
        logs.add(self)
        if library.path not in _CALLBACKS:

            def logged(level: int, message: Any, _data: Any) -> None:
                text = library.text(message)
                for log in tuple(logs):
                    log.add(level, text)

            _CALLBACKS[library.path] = library.ffi.callback("void(int, const char *, void *)")(logged)
            library.lib.llama_log_set(_CALLBACKS[library.path], library.ffi.NULL)

    def lines(self, *, least: int = LOG_DEBUG + 1) -> tuple[str, ...]:
        """The last lines with at least this level, oldest first."""
        return tuple(line for level, line in tuple(self._lines) if level >= least)

    def last(self, count: int = 4) -> str | None:
        """The last lines joined into one, as the hint of an error."""
        return " | ".join(self.lines()[-count:]) or None

    def mark(self) -> int:
        """The current position in the log, for `since`."""
        return self._count

    def since(self, mark: int, *, least: int = LOG_DEBUG) -> tuple[str, ...]:
        """The lines after a mark that are still kept."""
        new = min(self._count - mark, len(self._lines))
        return tuple(line for level, line in tuple(self._lines)[-new:] if level >= least) if new > 0 else ()

    def error(self, mark: int) -> str | None:
        """The first error after a mark; later ones only repeat that something failed."""
        return next(iter(self.since(mark, least=LOG_ERROR)), None)

    def add(self, level: int, text: str) -> None:
        """Add text from the library: whole lines or parts of one."""
        with self._lock:
            if level != LOG_CONTINUED:
                self._level = level
            *whole, self._part = (self._part + text).split("\n")
            whole = [line.rstrip() for line in whole if line.strip(" .")]
            self._lines.extend((self._level, line) for line in whole)
            self._count += len(whole)
            level = self._level
        if self._sink is not None:
            for line in whole:
                self._sink(level, line)
