"""What the proof has measured so far, and how much time is left for the rest.

Every stage has a file of JSON lines. A line is on the disk before the next measurement begins, so a run that is killed
keeps what it had, and the next one goes on where it stopped. The same lines are written to a second folder where one is
given, for machines that only hand back what lies there.
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
    """The files of one proof."""

    folder: Path
    mirror: Path | None = None

    def add(self, stage: str, key: str, **values: Any) -> Row:
        """Keep a row; a later one with the same key takes its place."""
        row: Row = {"key": key, "when": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
        for folder in (self.folder, *((self.mirror,) if self.mirror else ())):
            _append(folder / f"{stage}.jsonl", line)
        return row

    def of(self, stage: str) -> list[Row]:
        """The rows of a stage in the order of their keys' first lines."""
        return list(read([self.folder], stage).values())

    def get(self, stage: str, key: str) -> Row | None:
        """One row."""
        return read([self.folder], stage).get(key)

    def has(self, stage: str, key: str) -> bool:
        """Whether it was measured; a row that only says why it was not does not count."""
        row = self.get(stage, key)
        return row is not None and "skipped" not in row

    def mirror_all(self) -> None:
        """Rows of earlier runs, too, go where this one's go."""
        if self.mirror is None:
            return
        self.mirror.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.jsonl")):
            (self.mirror / path.name).write_bytes(path.read_bytes())


def read(folders: Iterable[Path], stage: str) -> dict[str, Row]:
    """Rows of a stage by key, of several runs: what was measured last counts; a line that was cut off does not."""
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
                file.write(b"\n")  # a line that a kill cut short
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Clock:
    """A moment by which something must have ended."""

    ends_s: float  # of time.monotonic

    @staticmethod
    def of(seconds: float) -> "Clock":
        """From now on."""
        return Clock(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Until then; never below 0."""
        return max(0.0, self.ends_s - time.monotonic())

    def part(self, seconds: float) -> "Clock":
        """Part of it for something, from now on."""
        return Clock(min(self.ends_s, time.monotonic() + seconds))

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long can still be begun."""
        return self.left_s >= seconds


def budgets(text: str, total_s: float) -> dict[str, float]:
    """`ledger,speed:200` as seconds by stage: what is said, and for the others what the whole run has."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, colon, seconds = part.strip().partition(":")
        if name not in STAGES:
            raise ValueError(f"there is no stage {name!r}: {', '.join(STAGES)}")
        try:
            found[name] = float(seconds) if colon else total_s
        except ValueError:
            raise ValueError(f"{seconds!r} is no number of seconds") from None
    return found
