"""Records of running engines on disk, to find detached engines again and to start no name twice.

    <state>/engines/NAME/engine.json    the record of the engine, replaced atomically
                         engine.log     its log; engine.log.1: rotated part; engine.log.exit: exit report;
                                        engine.log.previous and engine.log.previous.1: log of the previous process
                         lock           locked while NAME is started, stopped or adopted

Records of processes that have exited are ignored and removed.
"""

import asyncio
import fcntl
import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from tokenmill.engine.engine import EngineKind
from tokenmill.engine.process.identity import Pid
from tokenmill.errors import EngineError, UsageError
from tokenmill.storage.atomic import replace_file
from tokenmill.storage.private import private_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """One engine process."""

    name: str
    kind: EngineKind
    engine: Pid
    supervisor: Pid
    address: str  # URL or socket
    model: str
    model_id: str
    build: str
    argv: tuple[str, ...]
    started: float  # seconds since 1970
    log: str
    detached: bool
    predicted_host_bytes: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine process is running."""
        return self.engine.alive


def folder(state: Path, name: str) -> Path:
    """Folder of an engine; UsageError if the name is invalid."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"invalid engine name {name!r}", hint="use letters, digits, dots, dashes and underscores")
    return state / "engines" / name


def log_path(state: Path, name: str) -> Path:
    """Path of the engine's log."""
    return folder(state, name) / "engine.log"


def slots_path(state: Path, name: str) -> Path:
    """Folder in which a llama.cpp server saves its slots."""
    return folder(state, name) / "slots"


def write(state: Path, record: Record) -> None:
    """Write a record, replacing that of the same name."""
    home = folder(state, record.name)
    private_folder(home)
    replace_file(home / "engine.json", json.dumps(asdict(record), indent=1).encode())


def read(state: Path, name: str) -> Record | None:
    """Return the record of a name, also of a dead engine; None if it is missing or unreadable."""
    try:
        given = json.loads((folder(state, name) / "engine.json").read_text(encoding="utf-8"))
        supervisor = given.pop("minder", None) or given["supervisor"]  # "minder" until version 0.1
        record = Record(
            **{
                **given,
                "engine": Pid(**given["engine"]),
                "supervisor": Pid(**supervisor),
                "argv": tuple(given["argv"]),
            }
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if record.kind in get_args(EngineKind) and record.name == name else None


def listed(state: Path) -> tuple[Record, ...]:
    """Return the records of running engines, by name, and remove those of dead ones."""
    homes = sorted((state / "engines").iterdir()) if (state / "engines").is_dir() else []
    found = []
    for home in homes:
        record = read(state, home.name) if _NAME.fullmatch(home.name) else None
        if record is not None and record.alive:
            found.append(record)
        elif record is not None:
            forget(state, record)
    return tuple(found)


def forget(state: Path, record: Record) -> None:
    """Remove a record unless another one has replaced it; keeps the log."""
    if read(state, record.name) == record:
        with suppress(FileNotFoundError):
            (folder(state, record.name) / "engine.json").unlink()


@asynccontextmanager
async def locked(state: Path, name: str, *, wait_s: float = 0.0) -> AsyncIterator[None]:
    """Lock a name, so that only one process uses it; EngineError if another process holds the lock after `wait_s`."""
    home = folder(state, name)
    private_folder(home)
    file = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + wait_s
        while not _taken(file):
            if time.monotonic() >= until:
                raise EngineError(
                    f"engine {name} is being started, stopped or used by process {_holder(file)}",
                    hint="wait for that process, or use another name",
                )
            await asyncio.sleep(_POLL_S)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)  # releases the lock; the kernel does the same if this process is killed


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: int) -> str:
    return os.pread(file, 32, 0).decode("ascii", errors="replace") or "another"
