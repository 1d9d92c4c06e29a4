"""Batch stores: their addresses, and `open_store` for reading them."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import log
from tokenmill.config import Config
from tokenmill.errors import ConfigError, UsageError
from tokenmill.jobs.models import Batch, State
from tokenmill.jobs.output import output_line
from tokenmill.jobs.store.address import Address, address_of
from tokenmill.jobs.store.gateway_db import GATEWAY_DB, MIGRATED
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import FILE, LOCK, WAIT
from tokenmill.jobs.store.sqlite_errors import unusable
from tokenmill.storage.atomic import replace_file
from tokenmill.storage.private import FILE_MODE, make_private, private_folder

BATCHES = "batches"  # in the state folder
_PRIVATE = ("engines", "gateway", "gateways", "heads", "loaded", "runners", "runs")
_STORE_FILES = ("files", FILE, f"{FILE}-wal", f"{FILE}-shm", LOCK, WAIT, GATEWAY_DB, MIGRATED)
_NAME = "batch_"
_PAGE = 512
_LAST = "last_batch"  # in the folder of a store: the name of the batch that was run last


def store_address(store: str | Path | None, config: Config) -> Address:
    """The address of a store; default: the configuration's, or the folder `batches` in the state folder."""
    named = str(store) if store is not None else config.store
    if named is None:
        keep_private(config)
        return config.state_path / BATCHES
    found = address_of(named)
    if store is not None or not isinstance(found, Path):
        return found
    try:
        return found.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"store: unknown user in {named}") from error


def keep_private(config: Config) -> None:
    """Remove other users' access to the state folder's batches, engines, keys and prefixes, and log what was changed.

    A configured `state_dir` keeps its own mode, because the folder may hold other things too.
    """
    state = config.state_path
    own = () if config.state_dir else (state,)
    folders = [state / name for name in (*_PRIVATE, BATCHES)]
    try:
        changed = make_private((*own, *folders, *(folders[-1] / name for name in _STORE_FILES)))
    except OSError as error:
        log.warning("other users may be able to read %s: %s", state, error.strerror)
        return
    if changed:
        log.warning("other users could read %s; now only you can", ", ".join(str(path) for path in changed))


def find_batch(reader: StoreReader, name: str) -> Batch:
    """The batch with a name or a unique beginning of one, or `last`. UsageError for none or several."""
    batches = reader.batches()
    if not batches:
        raise UsageError("there are no batches", hint="tokenmill run creates one")
    if name == "last":
        return _last(reader.address, batches)
    found = [batch for batch in batches if batch.name in (name, _NAME + name)]
    found = found or [batch for batch in batches if batch.name.removeprefix(_NAME).startswith(name.removeprefix(_NAME))]
    if not found:
        raise UsageError(f"no batch {name!r}", hint="tokenmill status lists all batches; last is the last one run")
    if len(found) > 1:
        names = ", ".join(batch.name for batch in found[:5])
        raise UsageError(f"{name!r} matches {len(found)} batches", hint=f"use more of the name: {names}")
    return found[0]


def remember_last(address: Address, batch: Batch) -> None:
    """Make a batch the one that `last` names until another is created or run; a server remembers only its newest."""
    if isinstance(address, Path):
        replace_file(address / _LAST, batch.name.encode(), mode=0o600)


def _last(address: Address, batches: Sequence[Batch]) -> Batch:
    """The batch that was run last, unless the newest was created after that."""
    newest = batches[-1]
    try:
        pointer = address / _LAST if isinstance(address, Path) else None
        if pointer is None or pointer.stat().st_mtime < newest.created_s:
            return newest
        name = pointer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return newest
    return next((batch for batch in batches if batch.name == name), newest)


class BatchStore:
    """Read access to the batches of a store, also while a run works on them. Close it, or use `with`."""

    def __init__(self, address: Address) -> None:
        """Use `open_store`."""
        self._address = address
        self._reader = StoreReader(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()

    def batches(self) -> list[Batch]:
        """All batches, oldest first."""
        return self._reader.batches()

    def batch(self, name: str = "last") -> Batch:
        """The batch with a name or a unique beginning of one; `last` is the newest."""
        return find_batch(self._reader, name)

    def results(self, name: str = "last") -> Iterator[dict[str, Any]]:
        """The result lines of a batch in the order of its jobs, in OpenAI's batch output format.

        Jobs without a result yet are left out. UsageError for an unknown batch.
        """
        return self._results(self.batch(name))

    def failures(self, name: str = "last") -> Iterator[dict[str, Any]]:
        """The result lines of the jobs that ended without an answer. UsageError for an unknown batch."""
        return self._failures(self.batch(name))

    def __repr__(self) -> str:
        return f"<tokenmill.BatchStore {self._address}>"

    def _results(self, batch: Batch) -> Iterator[dict[str, Any]]:
        number = 0
        while page := self._reader.results(batch.id, number, _PAGE):
            number = page[-1].number
            for result in page:
                if result.state.final and result.damaged_answer is None:
                    yield json.loads(output_line(batch.name, result))

    def _failures(self, batch: Batch) -> Iterator[dict[str, Any]]:
        number = 0
        while page := self._reader.failures(batch.id, number, _PAGE):
            number = page[-1].number
            for result in page:
                if result.state.final and result.state is not State.DONE:
                    yield json.loads(output_line(batch.name, result))


def open_store(store: str | Path | None = None, *, config: Config | str | Path | None = None) -> BatchStore:
    """Open a store for reading: a folder, `postgresql://user@host/database`, or the configuration's.

    StoreError if it does not exist or cannot be read.
    """
    return BatchStore(store_address(store, configuration(config)))


@contextmanager
def work_folder(address: Address, config: Config) -> Iterator[Path]:
    """A local folder for the files of a run: the store's folder, or a numbered folder locked by this process."""
    if isinstance(address, Path):
        yield address
        return
    runners = config.state_path / "runners"
    folders = (runners / str(number) for number in count(1))
    folder, lock = next((folder, lock) for folder in folders if (lock := _locked(folder)) is not None)
    try:
        yield folder
    finally:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """The lock file of a folder, locked; None if another process has it."""
    try:
        private_folder(folder)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
