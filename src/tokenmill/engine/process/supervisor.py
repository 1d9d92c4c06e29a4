"""Supervisor of one engine process: rotates its log, reports its exit status, and kills whatever it leaves behind.

    tokenmill -- supervisor -- engine -- the engine's own children

    tokenmill dies    -> the supervisor (watching a pidfd) stops the engine, unless it was started with --detach
    supervisor dies   -> the kernel kills the engine (PR_SET_PDEATHSIG)
    engine dies       -> its orphans are reparented to the supervisor (subreaper) and killed

Run as `python -m tokenmill.engine.process.supervisor ARGS_JSON COMMAND...`. Standard library only, except if limits
are set, so that it starts in 20 ms and needs about 10 MB. It contains nothing specific to engines.
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
NOTE = "tokenmill: "  # prefix of log lines written by tokenmill: settings that the kernel refused
KILL_NOW = signal.SIGUSR1  # kills without a grace period, unlike SIGTERM
_CHUNK = 1 << 16
_TERM_S = 5.0  # grace period of orphans: Python's resource tracker removes shared memory in it
_LEFTOVERS_S = 20.0  # time for killed orphans to exit; in uninterruptible sleep they cannot


@dataclass(frozen=True, slots=True)
class SupervisorArgs:
    """Arguments of a supervisor, passed as JSON."""

    log: str
    exit: str  # file for the exit report
    ready_fd: int  # receives one line of JSON when the engine has started or failed to start
    log_bytes: int
    grace_s: float
    parent: int | None  # stop the engine when this process exits; None: keep it running
    preparation: str | None = None
    pass_fds: tuple[int, ...] = ()
    cleanup_command: tuple[str, ...] = ()  # command to run after the engine has exited, e.g. to remove its container


class RotatingLog:
    """The log of one process: two files of together at most `max_bytes`. The previous process's files are renamed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._half = max_bytes // 2
        with suppress(FileNotFoundError):
            older(previous(path)).unlink()
        for file, kept in ((path, previous(path)), (older(path), older(previous(path)))):
            with suppress(FileNotFoundError):
                file.replace(kept)
        self._open()

    def write(self, data: bytes) -> None:
        """Append data, rotating to a new file when the current one is full."""
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
    """Return the path of a log's rotated part."""
    return log.with_name(log.name + ".1")


def previous(log: Path) -> Path:
    """Return the path of the log of the process before the current one."""
    return log.with_name(log.name + ".previous")


class Supervisor:
    """Starts one engine and supervises it until everything that it started has exited."""

    def __init__(self, args: SupervisorArgs, argv: list[str]) -> None:
        self.args = args
        self.argv = argv
        self.log = RotatingLog(Path(args.log), args.log_bytes)
        self.deadline: float | None = None  # when a stop with SIGTERM becomes SIGKILL
        self.stop_requested = self.kill_requested = False
        self.status: int | None = None  # wait status, as waitpid returns it
        self.most_rss_bytes: int | None = None
        self.kills_before = exit_status.kill_counts()
        self.began_s = time.monotonic()

    def run(self) -> None:
        """Start the engine, wait until it exits, report, and clean up."""
        wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, KILL_NOW)
        parent = _watch(self.args.parent)
        if self.args.parent is not None and parent is None:
            return  # the parent has exited already
        output, child_end = os.pipe()
        self.pid = self._spawn(child_end)
        os.close(child_end)
        # Both processes exist, because the engine has not been reaped yet.
        self._report_start({"engine": _identify(self.pid), "supervisor": _identify(os.getpid())})
        waited = [wake, output] + ([parent] if parent is not None else [])
        while self.status is None:
            ready, _, _ = select.select(waited, [], [], self._time_left_s())
            if output in ready and not self._copy_output(output):
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
        self._kill_leftovers(output)

    def _spawn(self, output: int) -> int:
        prepare = _preparation(self.args.preparation)
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
                pass_fds=self.args.pass_fds,
            )
        except OSError as error:
            self._report_start({"error": error.strerror or str(error), "errno": error.errno})
            raise SystemExit(127) from error
        for fd in self.args.pass_fds:
            os.close(fd)
        child.returncode = 0  # waited for below, by wait4
        return child.pid

    def _report_start(self, report: dict[str, Any]) -> None:
        with suppress(OSError):
            os.write(self.args.ready_fd, (json.dumps(report) + "\n").encode())
        os.close(self.args.ready_fd)

    def _time_left_s(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGCHLD in numbers:
            self._reap()
        if KILL_NOW in numbers:
            self.stop_requested = self.kill_requested = True
            self._signal(signal.SIGKILL)
        elif {signal.SIGTERM, signal.SIGINT} & set(numbers):
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self.stop_requested = True
        if self.deadline is None:
            self.deadline = time.monotonic() + self.args.grace_s
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

    def _copy_output(self, output: int) -> bool:
        data = os.read(output, _CHUNK)
        self.log.write(data)
        return bool(data)

    def _drain(self, output: int) -> None:
        """Copy the output that is in the pipe now; the engine's children may keep its other end open."""
        while select.select([output], [], [], 0)[0] and self._copy_output(output):
            pass

    def _report(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        killed = -code == signal.SIGKILL
        now = exit_status.kill_counts()
        report = {
            "pid": self.pid,
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "asked": self.stop_requested,
            "most_rss_bytes": self.most_rss_bytes,
            "memory_bytes": exit_status.memory_limit_bytes(),
            "kills": {name: count - self.kills_before.get(name, 0) for name, count in now.items()},
            "kernel": exit_status.kernel_line(self.pid, self.began_s) if killed and not self.stop_requested else None,
        }
        with suppress(OSError):
            replace_file(Path(self.args.exit), json.dumps(report).encode())

    def _kill_leftovers(self, output: int) -> None:
        """Kill all remaining descendants, then run the cleanup command."""
        term_until = time.monotonic() + (0.0 if self.kill_requested else _TERM_S)
        signalled: set[int] = set()
        while (now := time.monotonic()) < term_until + _LEFTOVERS_S:
            for pid in descendants(os.getpid()):
                if now >= term_until or pid not in signalled:  # many programs take a second SIGTERM as a kill
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if now >= term_until else signal.SIGTERM)
                    signalled.add(pid)
            self._drain(output)
            try:
                if os.wait4(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
            except ChildProcessError:
                break
        self._drain(output)
        if self.args.cleanup_command:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self.args.cleanup_command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=self.args.grace_s + _LEFTOVERS_S,
                )


def longest_stop_s(grace_s: float) -> float:
    """Return the maximum time from SIGTERM to the supervisor's exit: engine, orphans and the cleanup command."""
    return 2 * grace_s + _TERM_S + 2 * _LEFTOVERS_S


def _identify(pid: int) -> dict[str, Any]:
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
    from tokenmill.engine.process.preparation import Preparation  # noqa: PLC0415  a slow import

    return Preparation.decode(encoded).apply


def _watch(pid: int | None) -> int | None:
    """Return a pidfd that becomes readable when the parent exits; None if it has exited."""
    if pid is None:
        return None
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # If the parent had exited, its pid could be reused, but this process would have another parent.
    return watched if os.getppid() == pid else None


def _wake_on(*numbers: signal.Signals) -> int:
    """Return a pipe from which the numbers of received signals are read."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reading


def main() -> None:
    """Supervise one engine, with `SupervisorArgs` in the first argument."""
    parsed = json.loads(sys.argv[1])
    args = SupervisorArgs(
        **{**parsed, "pass_fds": tuple(parsed["pass_fds"]), "cleanup_command": tuple(parsed["cleanup_command"])}
    )
    if args.parent is None and os.fork():
        os._exit(0)  # a detached supervisor is reparented to init
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(args, sys.argv[2:]).run()


def command(args: SupervisorArgs, argv: list[str]) -> list[str]:
    """Return the command line that starts a supervisor."""
    return [sys.executable, "-P", "-m", "tokenmill.engine.process.supervisor", json.dumps(asdict(args)), *argv]


if __name__ == "__main__":
    main()
