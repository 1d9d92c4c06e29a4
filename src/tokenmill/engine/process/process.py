"""Starts, watches and stops a supervised process; the main entry point is `Process.start`.

The process is a child of its supervisor (supervisor.py), which rotates its log and exits with it. A detached process
can be watched again by its pids. This module contains nothing specific to engines.
"""

import asyncio
import errno
import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from tokenmill.engine.process import supervisor
from tokenmill.engine.process.exit_status import Exit, read_exit
from tokenmill.engine.process.identity import Pid, end_session
from tokenmill.errors import EngineError
from tokenmill.storage.private import private_folder
from tokenmill.units import MIB

LOG_BYTES = 16 * MIB
GRACE_S = 10.0  # between SIGTERM and SIGKILL
_REPORT_TIMEOUT_S = 60.0  # for the supervisor's exit report; the machine may be overloaded, or the disk slow
_SUPERVISOR_TIMEOUT_S = 60.0  # added to a supervisor's own time limits before it is killed
_POLL_S = 0.01
_TAIL_BYTES = 64 << 10
_log = logging.getLogger("tokenmill")


class Encodes(Protocol):
    """Kernel settings of the child: `preparation.Preparation`."""

    def encode(self) -> str:
        """Encode for the supervisor's arguments."""


class Process:
    """One supervised process. Must be used in the event loop in which it was created."""

    def __init__(
        self,
        pid: Pid,
        supervisor_pid: Pid,
        log: Path,
        *,
        predicted_host_bytes: int | None = None,
        child: "subprocess.Popen[bytes] | None" = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Watch a process and its supervisor; `child` is the supervisor if this process has to reap it."""
        self.pid = pid
        self.supervisor = supervisor_pid
        self.log = log
        self.predicted_host_bytes = predicted_host_bytes
        self._child = child
        self._stop_requested = False
        self._supervisor_s = supervisor.longest_stop_s(grace_s) + _SUPERVISOR_TIMEOUT_S
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[Exit] = self._loop.create_future()
        self._cleaned_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pidfd = self._open()
        if self._pidfd is None:
            self._on_exit(seen=False)
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    @staticmethod
    async def start(
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        preparation: Encodes | None = None,
        detach: bool = False,
        grace_s: float = GRACE_S,
        log_bytes: int = LOG_BYTES,
        pass_fds: Sequence[int] = (),
        cleanup_command: Sequence[str] = (),
        predicted_host_bytes: int | None = None,
    ) -> "Process":
        """Start a program; EngineError if it cannot be started.

        env: added to the environment of this process.
        detach: keep the program running when this process exits; otherwise it is stopped.
        pass_fds: inherited under the same numbers; the caller closes its own copies.
        cleanup_command: command that the supervisor runs after the program has exited.
        """
        private_folder(log.parent)
        exit_file(log).unlink(missing_ok=True)
        reading, writing = os.pipe()
        args = supervisor.SupervisorArgs(
            str(log.absolute()),
            str(exit_file(log).absolute()),
            writing,
            log_bytes,
            grace_s,
            None if detach else os.getpid(),
            preparation.encode() if preparation else None,
            tuple(pass_fds),
            tuple(cleanup_command),
        )
        with os.fdopen(reading, "rb") as ready, tempfile.TemporaryFile() as errors:
            try:
                child = subprocess.Popen(
                    supervisor.command(args, list(argv)),
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    stderr=errors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(writing, *pass_fds),
                )
            except OSError as error:
                raise _start_error(argv[0], str(error), error.errno) from error
            finally:
                os.close(writing)
            started = await _read_start_report(ready, child)
            if "engine" not in started:
                raise _start_error(argv[0], started.get("error") or _last_line_of(errors), started.get("errno"))
        if detach:
            await asyncio.to_thread(child.wait)  # the child forks the supervisor and exits
        return Process(
            Pid(**started["engine"]),
            Pid(**started["supervisor"]),
            log,
            predicted_host_bytes=predicted_host_bytes,
            child=None if detach else child,
            grace_s=grace_s,
        )

    @property
    def running(self) -> bool:
        """Whether the process has not exited."""
        return self._task is None

    @property
    def exit(self) -> Exit | None:
        """The exit status; None until it is known."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> Exit:
        """Wait for the exit status."""
        return await asyncio.shield(self._exit)

    async def stop(self) -> Exit:
        """Stop the process and its descendants with SIGTERM, then SIGKILL after the grace period, and wait for them.

        A supervisor that is stopped (SIGSTOP) is resumed; one that does not exit in time is killed with the process.
        """
        return await self._end(signal.SIGTERM)

    async def kill(self) -> Exit:
        """Kill the process and its descendants, and wait for them."""
        return await self._end(supervisor.KILL_NOW)

    async def _end(self, number: int) -> Exit:
        self._stop_requested = True
        self.supervisor.send(number)
        await _until_gone(self.supervisor, self._supervisor_s)
        self.pid.send(signal.SIGKILL)  # only needed if the supervisor failed to kill it
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self._cleaned_up.wait()
        except TimeoutError:
            _log.warning(
                "process %d does not exit after SIGKILL: it is in uninterruptible sleep, see dmesg", self.pid.pid
            )
            return Exit(asked=True)
        return await self.wait()

    def stop_watching(self) -> None:
        """Stop watching; a detached process keeps running. The object cannot be used after that."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def tail(self, lines: int = 20) -> tuple[str, ...]:
        """Return the last lines that this process wrote to its log."""
        return _tail((supervisor.older(self.log), self.log), lines)

    def describe(self) -> str:
        """Describe the exit status as a predicate for messages: `was killed by ...`."""
        return "is running" if self.exit is None else self.exit.describe(self.predicted_host_bytes)

    def _open(self) -> int | None:
        try:
            pidfd = os.pidfd_open(self.pid.pid)
        except ProcessLookupError:
            return None
        if Pid.here(self.pid.pid) == self.pid:
            return pidfd
        os.close(pidfd)  # the pid was reused by another process
        return None

    def _on_exit(self, *, seen: bool = True) -> None:
        self.stop_watching()
        self._task = self._loop.create_task(self._gather(seen))

    async def _gather(self, seen: bool) -> None:
        """Read the supervisor's report and wait until it has cleaned up; clean up here if it is dead."""
        path = exit_file(self.log)
        gone = asyncio.ensure_future(_until_gone(self.supervisor, self._supervisor_s))
        until = self._loop.time() + _REPORT_TIMEOUT_S
        while (report := read_exit(path)) is None and not gone.done() and self._loop.time() < until:
            await asyncio.sleep(_POLL_S)
        if report is None and gone.done():
            report = read_exit(path) or await self._unreported()
        self._exit.set_result(report or Exit(asked=self._stop_requested))
        await gone
        if self._child is not None:
            await _reaped(self._child)
        if seen and not path.exists():
            end_session(self.pid)
        self._cleaned_up.set()

    async def _unreported(self) -> Exit:
        """Return the exit status of a process whose supervisor has exited without a report."""
        code = await _reaped(self._child) if self._child is not None else 0
        return Exit(asked=self._stop_requested, supervisor_signal=-code if code < 0 else None)


def exit_file(log: Path) -> Path:
    """Return the path of the supervisor's exit report."""
    return log.with_name(log.name + ".exit")


def last_lines(log: Path, lines: int = 20) -> tuple[str, ...]:
    """Return the last lines of a log, including lines of the previous process if the current one wrote too few."""
    before = supervisor.previous(log)
    return _tail((supervisor.older(before), before, supervisor.older(log), log), lines)


def _tail(paths: Sequence[Path], lines: int) -> tuple[str, ...]:
    found: list[str] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue
        found += [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(found[-lines:])


def refused(log: Path) -> tuple[str, ...]:
    """Return the settings that the kernel refused a process at its start, from its log."""
    try:
        with log.open("rb") as file:
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(line.removeprefix(supervisor.NOTE) for line in text.splitlines() if line.startswith(supervisor.NOTE))


async def _reaped(child: "subprocess.Popen[bytes]") -> int:
    """Wait for a child's exit status; polls, because no thread can be started while Python exits."""
    while (code := child.poll()) is None:
        await asyncio.sleep(_POLL_S)
    return code


async def _until_gone(supervisor: Pid, limit_s: float) -> None:
    """Wait until a supervisor has exited; resume it if it is stopped (SIGSTOP), and kill it after the time limit."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    warned = False
    while supervisor.alive:
        if supervisor.stopped:
            if not warned:
                _log.warning("the engine's supervisor (pid %d) was stopped; resuming it (SIGCONT)", supervisor.pid)
                warned = True
            supervisor.send(signal.SIGCONT)
        if loop.time() > until:
            message = "the engine's supervisor (pid %d) has not exited after %.0f s; killing it and the engine"
            _log.warning(message, supervisor.pid, limit_s)
            supervisor.send(signal.SIGKILL)
            until = float("inf")
        await asyncio.sleep(_POLL_S)


async def _read_start_report(ready: IO[bytes], child: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Read the start report of the supervisor; empty if it wrote none. On cancellation, kill what was started."""
    reading = asyncio.ensure_future(asyncio.to_thread(ready.readline))
    try:
        line = await asyncio.shield(reading)
    except asyncio.CancelledError:
        started = json.loads(await reading or b"{}")  # the supervisor writes this before anything else
        if "supervisor" in started:
            supervisor_pid = Pid(**started["supervisor"])
            supervisor_pid.send(supervisor.KILL_NOW)
            await _until_gone(supervisor_pid, supervisor.longest_stop_s(GRACE_S) + _SUPERVISOR_TIMEOUT_S)
        await asyncio.to_thread(child.wait)
        raise
    report: dict[str, Any] = json.loads(line or b"{}")
    if "engine" not in report:
        await asyncio.to_thread(child.wait)
    return report


def _last_line_of(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "its supervisor exited immediately"


def _start_error(program: str, why: str, number: int | None) -> EngineError:
    hint = {
        errno.ENOENT: "install it, or set engine.binary or engine.container_runtime",
        errno.EACCES: "make it executable with chmod +x",
        errno.ENOEXEC: "it is not a program for this machine",
        errno.ENOMEM: "not enough memory to start it",
    }.get(number or 0)
    return EngineError(f"cannot start {program}: {why}", hint=hint)
