"""How many batches that came by HTTP stand where; reads the desk's rows and disturbs nobody who writes them."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from tokenmill.gateway.batch_records import STATUSES
from tokenmill.gateway.batch_repository import FILE

_WAIT_S = 1.0


def batches_by_status(state_path: Path) -> Mapping[str, int] | None:
    """Every status with its number; None: it cannot be read now."""
    path = state_path / "batches" / FILE
    found: dict[str, int] = dict.fromkeys(STATUSES, 0)
    if not path.is_file():
        return found
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)) as desk:
            return found | dict(desk.execute("SELECT status, COUNT(*) FROM batches GROUP BY status"))
    except sqlite3.Error:
        return None
