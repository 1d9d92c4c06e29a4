"""Migrates `desk.db`, in which gateways up to version 0.1 stored files and batches, into the store.

The rows are added in one transaction, existing rows stay unchanged, and then the file is renamed. An interrupted
migration is thus repeated at the next start.
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

GATEWAY_DB = "desk.db"
MIGRATED = "desk.db.migrated"
_VERSION = 1
_BUSY_S = 10.0


def migrate_gateway_db(folder: Path, into: HttpBatches) -> bool:
    """Migrate desk.db in a folder into the store; returns whether the file existed."""
    path = folder / GATEWAY_DB
    if not path.is_file():
        return False
    with mapped_errors(path), closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as old:
        old.row_factory = sqlite3.Row
        old.execute("PRAGMA locking_mode = EXCLUSIVE")
        old.execute("PRAGMA journal_mode = DELETE")  # removes the log
        version = old.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise StoreError(
                f"{path} was written by a newer tokenmill: it has version {version}, this one reads up to {_VERSION}",
                hint="upgrade tokenmill, or use another state folder",
            )
        if not path.is_file():  # another gateway has just migrated it
            return False
        if version:  # 0 if its creation was interrupted
            files = [dict(row) for row in old.execute("SELECT * FROM files ORDER BY seq")]
            batches = [_columns(dict(row)) for row in old.execute("SELECT * FROM batches ORDER BY seq")]
            into.import_rows([{key: row[key] for key in row if key != "seq"} for row in files], batches)
        try:
            path.rename(folder / MIGRATED)
            sync_folder(folder)
        except OSError as error:
            raise unusable(folder, error) from error
    return True


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of desk.db to a row of `http_batches`."""
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
