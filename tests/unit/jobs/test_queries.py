"""The SQL: every query is used, every used one exists, hot ones walk an index, and migrations lead to the schema."""

import re
import sqlite3
from pathlib import Path

import pytest

import tokenmill.jobs
from tokenmill.jobs.store.queries import migrations, newest, postgres_queries, queries, schema
from tokenmill.jobs.store.sqlite import APPLICATION_ID, migrate

SOURCES = list(Path(tokenmill.jobs.__path__[0]).rglob("*.py"))
CALL = re.compile(r"""\b(?:run|all|one|many)\(\s*"(\w+)\"|\bask\(connection, "(\w+)\"""")


@pytest.fixture
def empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(schema())
    return connection


def test_every_query_is_used_and_exists() -> None:
    used = {name for path in SOURCES for found in CALL.findall(path.read_text()) for name in found if name}
    copied = {name for name in postgres_queries() if name.endswith("_rows")}
    assert used | copied == set(postgres_queries())
    assert set(queries()) <= used


def test_no_other_file_holds_sql() -> None:
    for path in SOURCES:
        found = re.findall(r"\b(?:SELECT|INSERT INTO|UPDATE|DELETE FROM)\b [a-z*]", path.read_text())
        assert path.name in ("sqlite.py", "gateway_db.py") or not found, path


def plan(connection: sqlite3.Connection, name: str) -> list[str]:
    text = queries()[name]
    values = dict.fromkeys(re.findall(r":(\w+)", text), 1)
    last = max([int(number) for number in re.findall(r"\?(\d+)", text)] or [text.count("?")])
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values or tuple(range(last)))]


# What a million jobs must not be walked through for.
HOT = {
    "waiting": "USING INDEX jobs_open (batch=? AND (rank,place)>(?,?))",
    "due": "USING INDEX jobs_deadline (deadline_s>? AND deadline_s<?)",
    "next_retry": "USING INDEX jobs_later (not_before_s>?)",
    "job": "USING INTEGER PRIMARY KEY (rowid=?)",
    "take": "USING INTEGER PRIMARY KEY (rowid=?)",
    "block_of": "USING INTEGER PRIMARY KEY (rowid<?)",
    "start": "USING INTEGER PRIMARY KEY (rowid=?)",
    "add_answer": "USING INTEGER PRIMARY KEY (rowid=?)",
    "answer_job": "USING INTEGER PRIMARY KEY (rowid=?)",
    "fail": "USING INTEGER PRIMARY KEY (rowid=?)",
    "retry_later": "USING INTEGER PRIMARY KEY (rowid=?)",
    "record_crash": "USING INTEGER PRIMARY KEY (rowid=?)",
    "release": "USING INTEGER PRIMARY KEY (rowid=?)",
    "results": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    "failures": "USING INDEX jobs_failed (batch=? AND id>?)",
    "recover": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    "cancel_waiting": "USING INDEX jobs_open (batch=?)",
    "cancel_running": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    "retry_failed": "USING INDEX jobs_failed (batch=?)",
    "expire_jobs": "USING INDEX jobs_deadline (deadline_s>? AND deadline_s<?)",
    "expire_batch": "USING INDEX jobs_open (batch=?)",
    "holder_of_custom_id": "jobs_custom_id (batch=? AND custom_id=?)",
    "added": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    "add_job": "INDEX sqlite_autoindex_answers_1 (identity=?)",
    "answers_after": "USING INTEGER PRIMARY KEY (rowid>?)",
    "answered": "USING INTEGER PRIMARY KEY (rowid>?)",
    "requeue": "USING INTEGER PRIMARY KEY (rowid=?)",
    "has_answer": "INDEX sqlite_autoindex_answers_1 (identity=?)",
    "answer_to": "INDEX sqlite_autoindex_answers_1 (identity=?)",
    "last_job": "USING INTEGER PRIMARY KEY",
    "counts": "USING INTEGER PRIMARY KEY (rowid=?)",
    "batch": "USING INTEGER PRIMARY KEY (rowid=?)",
    "batch_by_key": "INDEX sqlite_autoindex_batches_2 (key=?)",
    "forget_jobs": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    "forget_blocks": "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
}


@pytest.mark.parametrize("name", HOT)
def test_hot_queries_walk_an_index(empty: sqlite3.Connection, name: str) -> None:
    steps = plan(empty, name)
    assert any(HOT[name] in step for step in steps), steps
    assert name == "added" or not any("TEMP B-TREE" in step for step in steps), steps  # six groups


@pytest.mark.parametrize("name", sorted(queries()))
def test_every_query_is_sql(empty: sqlite3.Connection, name: str) -> None:
    plan(empty, name)


def shape(connection: sqlite3.Connection) -> dict[str, object]:
    """What a schema amounts to: columns, indexes and triggers, however they came about."""
    found: dict[str, object] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall():
        found[name] = (
            re.sub(r"\s+", " ", re.sub(r"--.*", "", sql or ""))
            if kind != "table"
            else sorted(
                connection.execute('SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?)', (name,))
            )
        )
    return found


def test_migrations_lead_to_the_schema_from_every_version(empty: sqlite3.Connection) -> None:
    assert list(migrations()) == list(range(1, newest() + 1))
    for version in range(newest()):
        old = sqlite3.connect(":memory:", isolation_level=None)
        for number in range(1, version + 1):
            old.executescript(migrations()[number])
        migrate(old, [migrations()[number] for number in range(version + 1, newest() + 1)], newest())
        assert shape(old) == shape(empty)
        assert old.execute("PRAGMA user_version").fetchone() == (newest(),)
        assert old.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_a_migration_that_fails_leaves_the_version_before(empty: sqlite3.Connection) -> None:
    before = shape(empty)
    with pytest.raises(sqlite3.Error):
        migrate(empty, ["ALTER TABLE jobs ADD COLUMN more;", "ALTER TABLE nothing ADD COLUMN more;"], 99)
    assert shape(empty) == before
    assert empty.execute("PRAGMA user_version").fetchone() == (0,)
