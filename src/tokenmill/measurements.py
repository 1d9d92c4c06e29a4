"""The measurement journal: everything that was measured on this machine, in one SQLite file.

    load            memory and duration of a model load, next to the predicted values
    speed           speeds measured by a trial, a benchmark or a soak, next to the forecast
    trial           trials of `tokenmill tune`, which resumes from them
    point           the operating point of a model with an engine; the newest replaces the one before it
    stage           speeds of a recipe's stage
    soak            the last soak of a model with an engine
    qualification   the last qualification of a model with an engine

SQLite rather than JSON lines, because readers ask for one model on one machine, points and soaks are replaced, trials
are deleted, and each kind has its own limit; transactions allow concurrent writers and survive `kill -9`. A
record is a dataclass or mapping that names `machine_id`, `model_id`, `engine`, `build` and `when`, itself or in its
`place`; it is stored as JSON. Records hold figures, settings and names of machine and model; no prompts, no paths.

Earlier versions kept JSON files in `measured/`, `points/`, `soaks/` and `qualified/` of the state folder. Creating the
journal copies them into it; the files stay, and are not read again.
"""

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tokenmill.decode import decode
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.storage.private import private_folder

MeasurementKind = Literal["load", "speed", "trial", "point", "stage", "soak", "qualification"]
FILE = "measurements.db"
MAX_RECORDS: Mapping[MeasurementKind, int] = {
    "load": 3_000,
    "speed": 15_000,
    "trial": 15_000,
    "point": 1_000,
    "stage": 3_000,
    "soak": 1_000,
    "qualification": 1_000,
}
"""Maximum records of each kind; older ones are deleted."""
_VERSION = 1
_LOCK_TIMEOUT_S = 60.0
_SCHEMA = (
    """
    CREATE TABLE measurements (
        id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        machine_id TEXT,
        model_id TEXT,
        engine TEXT,
        build TEXT,
        recorded_at TEXT NOT NULL, -- ISO 8601, UTC
        record TEXT NOT NULL       -- JSON
    )
    """,
    "CREATE INDEX measurements_by_model ON measurements (kind, machine_id, model_id, engine)",
    "CREATE INDEX measurements_by_kind ON measurements (kind)",
)
_INSERT = """
    INSERT INTO measurements (kind, machine_id, model_id, engine, build, recorded_at, record)
    VALUES (:kind, :machine_id, :model_id, :engine, :build, :recorded_at, :record)
"""
_DELETE_SAME = """
    DELETE FROM measurements
    WHERE kind = :kind AND machine_id IS :machine_id AND model_id IS :model_id AND engine IS :engine
"""
_PRUNE = """
    DELETE FROM measurements
    WHERE kind = :kind
        AND id <= (SELECT id FROM measurements WHERE kind = :kind ORDER BY id DESC LIMIT 1 OFFSET :max_records)
"""
_SELECT = """
    SELECT record FROM measurements
    WHERE kind = :kind
        AND (:machine_id IS NULL OR machine_id = :machine_id)
        AND (:model_id IS NULL OR model_id = :model_id)
        AND (:engine IS NULL OR engine = :engine)
    ORDER BY id
"""
_EARLIER_FILES: tuple[tuple[str, MeasurementKind], ...] = (
    ("measured/loads.jsonl", "load"),
    ("measured/trials.jsonl", "speed"),
    ("measured/stages.jsonl", "stage"),
    ("points/*.trials.jsonl", "trial"),
    ("points/*.json", "point"),
    ("soaks/*.json", "soak"),
    ("qualified/*.json", "qualification"),
)
T = TypeVar("T")
log = logging.getLogger(__name__)


def journal_path(state: Path) -> Path:
    """The path of a state folder's journal."""
    return state / FILE


def append(state: Path, kind: MeasurementKind, record: object) -> None:
    """Add a record durably; TokenmillError if it cannot be stored."""
    with _writing(state) as connection:
        _insert(connection, kind, record)


def replace(state: Path, kind: MeasurementKind, record: object) -> None:
    """`append`, deleting the former records of the same kind, machine, model and engine."""
    with _writing(state) as connection:
        connection.execute(_DELETE_SAME, _row(kind, record))
        _insert(connection, kind, record)


def delete(state: Path, kind: MeasurementKind, *, machine_id: str, model_id: str, engine: str) -> None:
    """Delete the records of one model with one engine on one machine."""
    if _is_empty(state):
        return
    keys = {"kind": kind, "machine_id": machine_id, "model_id": model_id, "engine": engine}
    with _writing(state) as connection:
        connection.execute(_DELETE_SAME, keys)


def read(
    state: Path,
    kind: MeasurementKind,
    record_type: type[T],
    *,
    machine_id: str | None = None,
    model_id: str | None = None,
    engine: str | None = None,
) -> Iterator[T]:
    """Yield the records of a kind, oldest first, as `record_type`; those of another version are skipped."""
    for record in read_json(state, kind, machine_id=machine_id, model_id=model_id, engine=engine):
        try:
            yield decode(record_type, record, where=FILE)
        except ConfigError:
            continue


def read_json(
    state: Path,
    kind: MeasurementKind,
    *,
    machine_id: str | None = None,
    model_id: str | None = None,
    engine: str | None = None,
) -> list[dict[str, Any]]:
    """The records of a kind, oldest first; empty without a readable journal."""
    keys = {"kind": kind, "machine_id": machine_id, "model_id": model_id, "engine": engine}
    if _is_empty(state):
        return []
    try:
        with _connected(state) as connection:
            rows = connection.execute(_SELECT, keys).fetchall()
    except (sqlite3.Error, OSError) as error:
        log.warning("cannot read measurements in %s: %s", journal_path(state), error)
        return []
    return list(_objects(text for (text,) in rows))


def _is_empty(state: Path) -> bool:
    """Whether there are no measurements, so that reading need not create the journal."""
    return not journal_path(state).exists() and next(_earlier_records(state), None) is None


@contextmanager
def _writing(state: Path) -> Iterator[sqlite3.Connection]:
    """One transaction."""
    try:
        private_folder(state)
        with _connected(state) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise TokenmillError(
            f"cannot store measurements in {journal_path(state)}: {error}",
            hint="check state_dir and the free space on its disk; a damaged journal can be moved away",
            code="measurements_not_stored",
        ) from error


@contextmanager
def _connected(state: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the journal, created if it does not exist."""
    with closing(sqlite3.connect(journal_path(state), timeout=_LOCK_TIMEOUT_S, isolation_level=None)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise sqlite3.DatabaseError(f"written by a newer tokenmill (version {version})")
        if version < _VERSION:
            _create(connection, state)
        yield connection


def _create(connection: sqlite3.Connection, state: Path) -> None:
    """Create the tables and import the files of earlier versions, unless another process has just done so."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("PRAGMA user_version").fetchone() == (0,):
        for statement in _SCHEMA:
            connection.execute(statement)
        for kind, record in _earlier_records(state):
            _insert(connection, kind, record)
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")


def _insert(connection: sqlite3.Connection, kind: MeasurementKind, record: object) -> None:
    connection.execute(_INSERT, _row(kind, record))
    connection.execute(_PRUNE, {"kind": kind, "max_records": MAX_RECORDS[kind]})


def _row(kind: MeasurementKind, record: object) -> dict[str, str | None]:
    values = asdict(cast(Any, record)) if is_dataclass(record) else dict(cast(Mapping[str, Any], record))
    place = values.get("place")
    keys = place if isinstance(place, Mapping) else values
    return {
        "kind": kind,
        "recorded_at": _text(values.get("when")) or datetime.now(UTC).isoformat(timespec="seconds"),
        "record": json.dumps(values, separators=(",", ":")),
        **{name: _text(keys.get(name)) for name in ("machine_id", "model_id", "engine", "build")},
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _earlier_records(state: Path) -> Iterator[tuple[MeasurementKind, dict[str, Any]]]:
    """Records in the files of earlier versions; truncated ones are skipped."""
    for pattern, kind in _EARLIER_FILES:
        for path in sorted(state.glob(pattern)):
            try:
                data = path.read_bytes()
            except OSError:
                continue
            texts = data.splitlines() if path.suffix == ".jsonl" else (data,)
            yield from ((kind, record) for record in _objects(texts))


def _objects(texts: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The texts that parse as JSON objects."""
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
