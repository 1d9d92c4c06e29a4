"""The parent of one engine process: keeps its log small, notices its end, and leaves nothing of it behind.

    tokenmill -- minder -- engine -- workers of its own
        The minder ends the engine when tokenmill dies (it watches tokenmill's pidfd), unless the engine was started to
        outlive it. The engine dies with the minder (PR_SET_PDEATHSIG). Workers whose parent died become the minder's
        children (it is a subreaper) and are ended before it leaves.

Run as `python -m tokenmill.engine.process.supervisor ARGS_JSON COMMAND...`. Standard library only unless limits are
asked for, so that it starts in 20 ms and needs about 10 MB. It knows nothing about engines.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.engine.process import exit_status
from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.storage.atomic import replace_file

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOTE = "tokenmill: "  # before each line of a log that is ours: what the kernel refused
KILL_NOW = signal.SIGUSR1  # SIGTERM asks politely first
_CHUNK = 1 << 16
_POLITE_S = 5.0  # for what an engine left to clean up: Python's resource tracker removes shared memory in it
_LEFTOVERS_S = 20.0  # for killed processes to go; in uninterruptible sleep they cannot


@dataclass(frozen=True, slots=True)
class SupervisorArgs:
    """What a minder is told."""

    log: str
    exit: str  # file for what became of the engine
    ready_fd: int  # gets one line of JSON once the engine runs or cannot
    log_bytes: int
    grace_s: float
    parent: int | None  # die with this process; None: outlive it
    preparation: str | None = None
    pass_fds: tuple[int, ...] = ()
    afterwards: tuple[str, ...] = ()  # to run when the engine has ended: removes a container that outlived its client


class RotatingLog:
    """The log of one process: two files, together at most `most_bytes`. The previous process's files are kept aside."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._half = most_bytes // 2
        with suppress(FileNotFoundError):
            older(previous(path)).unlink()
        for file, kept in ((path, previous(path)), (older(path), older(previous(path)))):
            with suppress(FileNotFoundError):
                file.replace(kept)
        self._open()

    def write(self, data: bytes) -> None:
        """Append, moving to a new file when this one is full."""
        with suppress(OSError):  # a full disk costs the log, not the engine
            if self._size and self._size + len(data) > self._half:
                full = self._file
                self._open()
                os.close(full)
            self._size += os.write(self._file, data)

    def _open(self) -> None:
        if self._path.exists():
            self._path.replace(older(self._path))
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0


def older(log: Path) -> Path:
    """Where a log's earlier part is."""
    return log.with_name(log.name + ".1")


def previous(log: Path) -> Path:
    """The log of the process that wrote to `log` before the current one."""
    return log.with_name(log.name + ".previous")


class Minder:
    """One engine and the loop around it."""

    def __init__(self, orders: SupervisorArgs, argv: list[str]) -> None:
        self.orders = orders
        self.argv = argv
        self.log = RotatingLog(Path(orders.log), orders.log_bytes)
        self.deadline: float | None = None  # of a polite stop
        self.asked = self.hurried = False
        self.status: int | None = None  # as waitpid gives it
        self.most_rss_bytes: int | None = None
        self.kills_before = exit_status.kill_counts()
        self.began_s = time.monotonic()

    def run(self) -> None:
        """Start the engine, watch it to its end, clean up."""
        wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, KILL_NOW)
        parent = _watch(self.orders.parent)
        if self.orders.parent is not None and parent is None:
            return  # it died before we could watch it
        output, child_end = os.pipe()
        self.pid = self._spawn(child_end)
        os.close(child_end)
        # not reaped yet, so both are there
        self._say({"engine": _known(self.pid), "minder": _known(os.getpid())})
        waited = [wake, output] + ([parent] if parent is not None else [])
        while self.status is None:
            ready, _, _ = select.select(waited, [], [], self._patience())
            if output in ready and not self._take(output):
                waited.remove(output)
            if wake in ready:
                self._signals(os.read(wake, 4096))
            if parent is not None and parent in ready:
                waited.remove(parent)
                self._stop(signal.SIGTERM)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self._signal(signal.SIGKILL)
        self._drain(output)
        self._report(self.status)
        self._leave_nothing(output)

    def _spawn(self, output: int) -> int:
        prepare = _preparation(self.orders.preparation)
        me = os.getpid()

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            for note in prepare():
                os.write(2, f"{NOTE}{note}\n".encode())

        try:
            child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509  one thread only
                pass_fds=self.orders.pass_fds,
            )
        except OSError as error:
            self._say({"error": error.strerror or str(error), "errno": error.errno})
            raise SystemExit(127) from error
        for fd in self.orders.pass_fds:
            os.close(fd)
        child.returncode = 0  # waited for below, by wait4
        return child.pid

    def _say(self, what: dict[str, Any]) -> None:
        with suppress(OSError):
            os.write(self.orders.ready_fd, (json.dumps(what) + "\n").encode())
        os.close(self.orders.ready_fd)

    def _patience(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGCHLD in numbers:
            self._reap()
        if KILL_NOW in numbers:
            self.asked = self.hurried = True
            self._signal(signal.SIGKILL)
        elif {signal.SIGTERM, signal.SIGINT} & set(numbers):
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self.asked = True
        if self.deadline is None:
            self.deadline = time.monotonic() + self.orders.grace_s
            self._signal(number)

    def _signal(self, number: int) -> None:
        self.deadline = self.deadline if number == signal.SIGTERM else None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status
                self.most_rss_bytes = usage.ru_maxrss * 1024

    def _take(self, output: int) -> bool:
        data = os.read(output, _CHUNK)
        self.log.write(data)
        return bool(data)

    def _drain(self, output: int) -> None:
        """What lies in the pipe already; workers may still hold its other end."""
        while select.select([output], [], [], 0)[0] and self._take(output):
            pass

    def _report(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        killed = -code == signal.SIGKILL
        now = exit_status.kill_counts()
        report = {
            "pid": self.pid,
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "asked": self.asked,
            "most_rss_bytes": self.most_rss_bytes,
            "memory_bytes": exit_status.memory_limit_bytes(),
            "kills": {name: count - self.kills_before.get(name, 0) for name, count in now.items()},
            "kernel": exit_status.kernel_line(self.pid, self.began_s) if killed and not self.asked else None,
        }
        with suppress(OSError):
            replace_file(Path(self.orders.exit), json.dumps(report).encode())

    def _leave_nothing(self, output: int) -> None:
        """End whatever the engine left, wherever it moved: every descendant is a child of ours sooner or later."""
        polite = time.monotonic() + (0.0 if self.hurried else _POLITE_S)
        asked: set[int] = set()
        while (now := time.monotonic()) < polite + _LEFTOVERS_S:
            for pid in descendants(os.getpid()):
                if now >= polite or pid not in asked:  # a second SIGTERM often means: at once
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if now >= polite else signal.SIGTERM)
                    asked.add(pid)
            self._drain(output)
            try:
                if os.wait4(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
            except ChildProcessError:
                break
        self._drain(output)
        if self.orders.afterwards:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self.orders.afterwards,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=self.orders.grace_s + _LEFTOVERS_S,
                )


def longest_stop_s(grace_s: float) -> float:
    """The longest that a supervisor takes to exit after SIGTERM: engine, its leftovers, and the command afterwards."""
    return 2 * grace_s + _POLITE_S + 2 * _LEFTOVERS_S


def _known(pid: int) -> dict[str, Any]:
    found = Pid.here(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return asdict(found)


def prctl(option: int, value: int) -> None:
    """prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _preparation(encoded: str | None) -> Any:
    if encoded is None:
        return lambda: ()
    from tokenmill.engine.process.preparation import Preparation  # noqa: PLC0415  costs more than all else here

    return Preparation.decode(encoded).apply


def _watch(pid: int | None) -> int | None:
    """A descriptor that becomes readable when the parent ends; None if it ended already."""
    if pid is None:
        return None
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # only now is it certain that the number is still the parent's: had it died, we would have another parent
    return watched if os.getppid() == pid else None


def _wake_on(*numbers: signal.Signals) -> int:
    """A descriptor from which the numbers of signals are read."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reading


def main() -> None:
    """Mind one engine; see Orders."""
    given = json.loads(sys.argv[1])
    orders = SupervisorArgs(**{**given, "pass_fds": tuple(given["pass_fds"]), "afterwards": tuple(given["afterwards"])})
    if orders.parent is None and os.fork():
        os._exit(0)  # the one who outlives his parent is nobody's child
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Minder(orders, sys.argv[2:]).run()


def command(orders: SupervisorArgs, argv: list[str]) -> list[str]:
    """What starts a minder."""
    return [sys.executable, "-P", "-m", "tokenmill.engine.process.supervisor", json.dumps(asdict(orders)), *argv]


if __name__ == "__main__":
    main()
