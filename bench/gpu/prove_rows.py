"""Results of the validation so far, and the remaining time.

Every stage has a file of JSON lines. A line is on disk before the next measurement begins, so a killed run keeps its
results and the next one continues. The lines are also written to a second folder, if given, for machines that return
only that folder.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STAGES = ("build", "slice", "ledger", "speed", "tune", "batch", "digest")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The files of one validation."""

    folder: Path
    mirror: Path | None = None

    def add(self, stage: str, key: str, **values: Any) -> Row:
        """Store a row; a later one with the same key replaces it."""
        row: Row = {"key": key, "when": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
        for folder in (self.folder, *((self.mirror,) if self.mirror else ())):
            _append(folder / f"{stage}.jsonl", line)
        return row

    def of(self, stage: str) -> list[Row]:
        """The rows of a stage, in the order in which their keys were first stored."""
        return list(read([self.folder], stage).values())

    def get(self, stage: str, key: str) -> Row | None:
        """One row."""
        return read([self.folder], stage).get(key)

    def has(self, stage: str, key: str) -> bool:
        """Whether a point was measured; a row with the reason why it was not does not count."""
        row = self.get(stage, key)
        return row is not None and "skipped" not in row

    def mirror_all(self) -> None:
        """Copy rows of earlier runs to the second folder."""
        if self.mirror is None:
            return
        self.mirror.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.jsonl")):
            (self.mirror / path.name).write_bytes(path.read_bytes())


def read(folders: Iterable[Path], stage: str) -> dict[str, Row]:
    """Rows of a stage by key, from several runs; the latest measurement is used, incomplete lines are ignored."""
    found: dict[str, Row] = {}
    for folder in folders:
        path = folder / f"{stage}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("key"), str):
                known = found.get(row["key"])
                if known is None or "skipped" not in row or "skipped" in known:
                    found[row["key"]] = row
    return found


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a line that was cut off by a kill
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Clock:
    """A deadline."""

    ends_s: float  # of time.monotonic

    @staticmethod
    def of(seconds: float) -> "Clock":
        """A deadline in this number of seconds."""
        return Clock(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.ends_s - time.monotonic())

    def part(self, seconds: float) -> "Clock":
        """A share of the remaining time, from now."""
        return Clock(min(self.ends_s, time.monotonic() + seconds))

    def allows(self, seconds: float) -> bool:
        """Whether something of this duration can still be started."""
        return self.left_s >= seconds


def budgets(text: str, total_s: float) -> dict[str, float]:
    """`ledger,speed:200` as seconds by stage; stages without a number get the time of the whole run."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, colon, seconds = part.strip().partition(":")
        if name not in STAGES:
            raise ValueError(f"unknown stage {name!r}; stages: {', '.join(STAGES)}")
        try:
            found[name] = float(seconds) if colon else total_s
        except ValueError:
            raise ValueError(f"invalid number of seconds {seconds!r}") from None
    return found
