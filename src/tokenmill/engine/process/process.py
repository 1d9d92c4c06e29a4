"""A process of ours, seen from here: started, watched, ended.

The process is the child of a minder (see minder.py), which keeps its log small and outlives neither it nor, unless
asked to, us. One that was started detached is watched again through its pids. Knows nothing about engines.
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
from tokenmill.units import MIB

LOG_BYTES = 16 * MIB
GRACE_S = 10.0  # between SIGTERM and SIGKILL
_REPORT_S = 60.0  # for a living minder to say how the end was; it may be starved, or its disk slow
_SUPERVISOR_S = 60.0  # beyond its own time limits, for a supervisor to exit before it is killed
_POLL_S = 0.01
_TAIL_BYTES = 64 << 10
_log = logging.getLogger("tokenmill")


class Encodes(Protocol):
    """Nice value, processors and limits of a child, as `priority.Preparation` holds them."""

    def encode(self) -> str:
        """As text for the minder."""


class Process:
    """One running process. Belongs to the event loop in which it was made."""

    def __init__(
        self,
        pid: Pid,
        mind: Pid,
        log: Path,
        *,
        predicted_host_bytes: int | None = None,
        child: "subprocess.Popen[bytes] | None" = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Watch a process under its minder; `child` is the minder where it is ours to reap."""
        self.pid = pid
        self.minder = mind
        self.log = log
        self.predicted_host_bytes = predicted_host_bytes
        self._child = child
        self._asked = False
        self._supervisor_s = supervisor.longest_stop_s(grace_s) + _SUPERVISOR_S
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[Exit] = self._loop.create_future()
        self._clean = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pidfd = self._open()
        if self._pidfd is None:
            self._over(seen=False)
        else:
            self._loop.add_reader(self._pidfd, self._over)

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
        afterwards: Sequence[str] = (),
        predicted_host_bytes: int | None = None,
    ) -> "Process":
        """Run a program; `env` is added to ours. It dies with us unless detached. EngineError if it cannot be run.

        `pass_fds` are inherited under their numbers; closing our own copies is the caller's. `afterwards` is run when
        the process has ended, whether we still live or not.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        exit_file(log).unlink(missing_ok=True)
        reading, writing = os.pipe()
        orders = supervisor.SupervisorArgs(
            str(log.absolute()),
            str(exit_file(log).absolute()),
            writing,
            log_bytes,
            grace_s,
            None if detach else os.getpid(),
            preparation.encode() if preparation else None,
            tuple(pass_fds),
            tuple(afterwards),
        )
        with os.fdopen(reading, "rb") as ready, tempfile.TemporaryFile() as said:
            try:
                child = subprocess.Popen(
                    supervisor.command(orders, list(argv)),
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(writing, *pass_fds),
                )
            except OSError as error:
                raise _cannot(argv[0], str(error), error.errno) from error
            finally:
                os.close(writing)
            started = await _first_word(ready, child)
            if "engine" not in started:
                raise _cannot(argv[0], started.get("error") or _end_of(said), started.get("errno"))
        if detach:
            await asyncio.to_thread(child.wait)  # it has forked the minder and left
        return Process(
            Pid(**started["engine"]),
            Pid(**started["minder"]),
            log,
            predicted_host_bytes=predicted_host_bytes,
            child=None if detach else child,
            grace_s=grace_s,
        )

    @property
    def running(self) -> bool:
        """Whether its end has not been noticed."""
        return self._task is None

    @property
    def exit(self) -> Exit | None:
        """How it ended; None while that is not known."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> Exit:
        """How it ended, once it has."""
        return await asyncio.shield(self._exit)

    async def stop(self) -> Exit:
        """SIGTERM to it and all it started, SIGKILL after the grace period; nothing is left on return.

        A supervisor that is stopped (SIGSTOP) is resumed; one that does not exit in time is killed with the process.
        """
        return await self._end(signal.SIGTERM)

    async def kill(self) -> Exit:
        """SIGKILL to it and all it started; nothing is left on return."""
        return await self._end(supervisor.KILL_NOW)

    async def _end(self, number: int) -> Exit:
        self._asked = True
        self.minder.send(number)
        await _until_gone(self.minder, self._supervisor_s)
        self.pid.send(signal.SIGKILL)  # still there only if the supervisor could not end it
        try:
            async with asyncio.timeout(_REPORT_S):
                await self._clean.wait()
        except TimeoutError:
            _log.warning("process %d does not exit after SIGKILL; it waits in the kernel, see dmesg", self.pid.pid)
            return Exit(asked=True)
        return await self.wait()

    def let_go(self) -> None:
        """Watch no longer; a detached process goes on. Nothing else may be asked of this object then."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def tail(self, lines: int = 20) -> tuple[str, ...]:
        """The last lines that this process wrote to its log."""
        return _tail((supervisor.older(self.log), self.log), lines)

    def words(self) -> str:
        """How it ended, for a message that names it before: `was killed for memory ...`."""
        return "is running" if self.exit is None else self.exit.words(self.predicted_host_bytes)

    def _open(self) -> int | None:
        try:
            pidfd = os.pidfd_open(self.pid.pid)
        except ProcessLookupError:
            return None
        if Pid.here(self.pid.pid) == self.pid:
            return pidfd
        os.close(pidfd)  # the number is another's by now
        return None

    def _over(self, *, seen: bool = True) -> None:
        self.let_go()
        self._task = self._loop.create_task(self._gather(seen))

    async def _gather(self, seen: bool) -> None:
        """Take the supervisor's report and wait until it has cleaned up; if it is dead as well, clean up here."""
        path = exit_file(self.log)
        gone = asyncio.ensure_future(_until_gone(self.minder, self._supervisor_s))
        until = self._loop.time() + _REPORT_S
        while (report := read_exit(path)) is None and not gone.done() and self._loop.time() < until:
            await asyncio.sleep(_POLL_S)
        if report is None and gone.done():
            report = read_exit(path) or await self._unreported()
        self._exit.set_result(report or Exit(asked=self._asked))
        await gone
        if self._child is not None:
            await _reaped(self._child)
        if seen and not path.exists():
            end_session(self.pid)
        self._clean.set()

    async def _unreported(self) -> Exit:
        """How the process ended under a supervisor that is gone and has left no report."""
        code = await _reaped(self._child) if self._child is not None else 0
        return Exit(asked=self._asked, supervisor_signal=-code if code < 0 else None)


def exit_file(log: Path) -> Path:
    """Where a minder says how its process ended."""
    return log.with_name(log.name + ".exit")


def last_lines(log: Path, lines: int = 20) -> tuple[str, ...]:
    """The last lines of a log, including those of the previous process where the current one wrote fewer."""
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
    """What the kernel did not grant a process before it began, as the head of its log says."""
    try:
        with log.open("rb") as file:
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(line.removeprefix(supervisor.NOTE) for line in text.splitlines() if line.startswith(supervisor.NOTE))


async def _reaped(child: "subprocess.Popen[bytes]") -> int:
    """The exit status of a child; needs no thread, because none can be started while Python exits."""
    while (code := child.poll()) is None:
        await asyncio.sleep(_POLL_S)
    return code


async def _until_gone(supervisor: Pid, limit_s: float) -> None:
    """Wait until a supervisor has exited; resume it if it is stopped (SIGSTOP), and kill it after the time limit."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    told = False
    while supervisor.alive:
        if supervisor.stopped:
            if not told:
                _log.warning("the engine's supervisor (pid %d) was stopped; resuming it (SIGCONT)", supervisor.pid)
                told = True
            supervisor.send(signal.SIGCONT)
        if loop.time() > until:
            words = "the engine's supervisor (pid %d) has not exited after %.0f s; killing it and the engine"
            _log.warning(words, supervisor.pid, limit_s)
            supervisor.send(signal.SIGKILL)
            until = float("inf")
        await asyncio.sleep(_POLL_S)


async def _first_word(ready: IO[bytes], child: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What the minder says once the process runs; empty if it says nothing. Cancelled, it ends what was started."""
    reading = asyncio.ensure_future(asyncio.to_thread(ready.readline))
    try:
        line = await asyncio.shield(reading)
    except asyncio.CancelledError:
        word = json.loads(await reading or b"{}")  # soon: it says this before anything else
        if "minder" in word:
            mind = Pid(**word["minder"])
            mind.send(supervisor.KILL_NOW)
            await _until_gone(mind, supervisor.longest_stop_s(GRACE_S) + _SUPERVISOR_S)
        await asyncio.to_thread(child.wait)
        raise
    said: dict[str, Any] = json.loads(line or b"{}")
    if "engine" not in said:
        await asyncio.to_thread(child.wait)
    return said


def _end_of(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process that was to watch it ended at once"


def _cannot(program: str, why: str, number: int | None) -> EngineError:
    hint = {
        errno.ENOENT: "is it installed, and on PATH? engine.binary and engine.container_runtime say what is run",
        errno.EACCES: "is it executable? chmod +x",
        errno.ENOEXEC: "it is no program, or one for another machine",
        errno.ENOMEM: "too little memory even to start it",
    }.get(number or 0)
    return EngineError(f"cannot start {program}: {why}", hint=hint)
