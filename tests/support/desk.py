"""A state folder of a gateway of version 0.1, which stored files and batches in desk.db; see
tests/data/desk/README.md.
"""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "desk"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())


def old_state(state: Path) -> Path:
    """Its folder of batches. The gateway was killed: what desk.db holds is still in its write-ahead log."""
    folder = state / "batches"
    shutil.copytree(DATA / "files", folder / "files")
    for name in ("store", "desk"):
        whole = state / f"{name}.db"
        connection = sqlite3.connect(whole, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript((DATA / f"{name}.sql").read_text().replace("@STATE@", str(state)))
        for end in ("", "-wal"):
            shutil.copy(f"{whole}{end}", folder / f"{name}.db{end}")
        connection.close()
        whole.unlink()
    return folder
