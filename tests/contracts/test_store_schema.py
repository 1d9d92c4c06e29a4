"""The tables of the store and of the gateway's files: databases that users have must stay readable."""

import sqlite3
from contextlib import closing
from pathlib import Path

from support import contracts
from tokenmill.gateway.batch_repository import FILE, BatchRepository
from tokenmill.jobs.queries import newest, postgres_migrations, postgres_schema, schema


def schema_of(connection: sqlite3.Connection, version: int) -> str:
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name").fetchall()
    return f"PRAGMA user_version = {version};\n\n" + contracts.sql("".join(f"{statement};\n" for (statement,) in rows))


def test_schema_of_sqlite() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema())
        contracts.check("store_sqlite.sql", schema_of(connection, newest()))


def test_schema_of_postgres() -> None:
    contracts.check(
        "store_postgres.sql", f"version {max(postgres_migrations())};\n\n{contracts.sql(postgres_schema())}"
    )


def test_schema_of_the_gateways_files(tmp_path: Path) -> None:
    BatchRepository(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        contracts.check("gateway_files_sqlite.sql", schema_of(connection, version))
