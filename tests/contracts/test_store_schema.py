"""The store's tables: databases that users have must stay readable."""

import sqlite3

from support import contracts
from tokenmill.jobs.store.queries import newest, postgres_migrations, postgres_schema, schema


def test_schema_of_sqlite() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript(schema())
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name").fetchall()
    text = "".join(f"{statement};\n" for (statement,) in rows)
    contracts.check("store_sqlite.sql", f"PRAGMA user_version = {newest()};\n\n{contracts.sql(text)}")


def test_schema_of_postgres() -> None:
    contracts.check(
        "store_postgres.sql", f"version {max(postgres_migrations())};\n\n{contracts.sql(postgres_schema())}"
    )
