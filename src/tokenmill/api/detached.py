"""Batches that run in the background: `start` starts one, `follow` copies what it prints until it ends.

    <state>/runs/BATCH/run.json   its process and its supervisor
                       run.log    its output, rotated; run.log.exit: the exit report

A supervisor as of an engine (`engine/process`) writes the log and reports the exit status. The run ends by itself, with
its supervisor, or by SIGTERM, after which the same command continues.
"""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenmill.engine.process.exit_status import Exit
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.process.process import Process, last_lines
from tokenmill.errors import UsageError
from tokenmill.storage.atomic import replace_file
from tokenmill.storage.private import private_folder

_FOLDER = "runs"  # in the state folder
_RECORD = "run.json"
_STOP_S = 300.0  # between SIGTERM and SIGKILL: answers in flight are kept and the engine is stopped
_POLL_S = 0.2
_SHOWN_LINES = 20  # of the log, when following begins


@dataclass(frozen=True, slots=True)
class DetachedRun:
    """A run in the background, or one that has ended."""

    batch: str
    process: Pid
    supervisor: Pid
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.alive


async def start(state: Path, batch: str, command: Sequence[str]) -> DetachedRun:
    """Start a command that runs a batch and outlives this process."""
    folder = state / _FOLDER / batch
    private_folder(folder)
    log = folder / "run.log"
    process = await Process.start(command, log=log, detach=True, grace_s=_STOP_S)
    process.stop_watching()
    run = DetachedRun(batch, process.pid, process.supervisor, log)
    record = {"process": asdict(run.process), "supervisor": asdict(run.supervisor)}
    replace_file(folder / _RECORD, json.dumps(record).encode())
    return run


def runs(state: Path) -> list[DetachedRun]:
    """The runs of every batch that was started in the background, the last started one at the end."""
    records = sorted((state / _FOLDER).glob(f"*/{_RECORD}"), key=lambda path: path.stat().st_mtime)
    return [run for record in records if (run := _read(record)) is not None]


def find(state: Path, batch: str | None) -> DetachedRun:
    """The run of a batch by the beginning of its name, or the last one; UsageError if there is none."""
    found = [run for run in runs(state) if batch is None or batch in (run.batch, "last") or _begins(run.batch, batch)]
    if not found:
        what = "no batch" if batch is None else f"no batch {batch!r}"
        raise UsageError(f"{what} was started with --detach", hint="tokenmill status shows every batch")
    return found[-1]


def running(state: Path, batch: str) -> DetachedRun | None:
    """The run of this batch if it runs in the background now."""
    run = _read(state / _FOLDER / batch / _RECORD)
    return run if run is not None and run.alive else None


async def follow(run: DetachedRun, write: Callable[[str], None]) -> Exit:
    """Copy the end of the run's log and everything that it prints from now on; returns its exit status."""
    process = Process(run.process, run.supervisor, run.log, grace_s=_STOP_S)
    ended = asyncio.ensure_future(process.wait())
    log = _Log(run.log)
    write("".join(f"{line}\n" for line in last_lines(run.log, _SHOWN_LINES)))
    log.skip()
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=_POLL_S)
            write(log.read())
        return await ended
    finally:
        ended.cancel()
        process.stop_watching()
        log.close()


class _Log:
    """The unread part of a log, which the supervisor replaces by a new file when it is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")

    def skip(self) -> None:
        """Ignore what has been written so far."""
        self._file.seek(0, os.SEEK_END)

    def read(self) -> str:
        text = self._file.read()
        if os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino:
            self._file.close()
            self._file = self._path.open("rb")
            text += self._file.read()
        return text.decode("utf-8", errors="replace")

    def close(self) -> None:
        self._file.close()


def _begins(name: str, beginning: str) -> bool:
    return name.startswith(beginning) or name.removeprefix("batch_").startswith(beginning)


def _read(record: Path) -> DetachedRun | None:
    try:
        given = json.loads(record.read_text(encoding="utf-8"))
        pids = Pid(**given["process"]), Pid(**given["supervisor"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return DetachedRun(record.parent.name, *pids, record.parent / "run.log")
