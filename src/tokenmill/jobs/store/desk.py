"""Migrates `desk.db`, in which gateways up to version 0.1 kept files and batches, into the store.

The rows are added in one transaction, existing rows stay unchanged, and the file is renamed only after that. So an
interrupted migration is repeated at the next start.
"""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenmill.errors import StoreError
from tokenmill.jobs.store.http_batches import FINAL, HttpBatches
from tokenmill.jobs.store.sqlite_errors import mapped_errors, unusable
from tokenmill.storage.atomic import sync_folder

DESK = "desk.db"
TAKEN_OVER = "desk.db.migrated"
_VERSION = 1
_BUSY_S = 10.0


def take_over_desk(folder: Path, into: HttpBatches) -> bool:
    """Migrate desk.db in a folder into the store; returns whether there was one."""
    path = folder / DESK
    if not path.is_file():
        return False
    with mapped_errors(path), closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as desk:
        desk.row_factory = sqlite3.Row
        desk.execute("PRAGMA locking_mode = EXCLUSIVE")
        desk.execute("PRAGMA journal_mode = DELETE")  # no log remains, and no other process uses the file
        version = desk.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise StoreError(
                f"{path} was written by a newer tokenmill: its version is {version}, {_VERSION} is known here",
                hint="use that tokenmill, or another state folder",
            )
        if not path.is_file():  # another gateway has just done it
            return False
        if version:  # 0: its creation was interrupted
            files = [dict(row) for row in desk.execute("SELECT * FROM files ORDER BY seq")]
            batches = [_columns(dict(row)) for row in desk.execute("SELECT * FROM batches ORDER BY seq")]
            into.take_over([{key: row[key] for key in row if key != "seq"} for row in files], batches)
        try:
            path.rename(folder / TAKEN_OVER)
            sync_folder(folder)
        except OSError as error:
            raise unusable(folder, error) from error
    return True


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of desk.db to one of `http_batches`."""
    times = json.loads(row["times"])
    status = row["status"]
    kept = {key: row[key] for key in row if key not in ("seq", "window", "status", "times")}
    return {
        **kept,
        "completion_window": row["window"],
        "in_progress_s": times.get("in_progress"),
        "finalizing_s": times.get("finalizing"),
        "cancelling_s": times.get("cancelling"),
        "ended_s": times.get(status) if status in FINAL else None,
        "ended": status if status in FINAL else None,
    }
