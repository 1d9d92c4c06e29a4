"""Reads the schema, its migrations and the named queries from sql/. No other module contains SQL.

Queries are written for both databases, with values as :name; those that differ on PostgreSQL are in postgres.sql.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_VALUE = re.compile(r"(?<!:):([a-z]\w*)")
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


@cache
def queries() -> Mapping[str, str]:
    """All queries by name."""
    return _named("queries.sql")


@cache
def postgres_queries() -> Mapping[str, str]:
    """All queries by name, in psycopg's syntax."""
    both = {**queries(), **_named("postgres.sql")}
    return {name: _VALUE.sub(r"%(\1)s", text.replace("%", "%%")).replace("?", "%s") for name, text in both.items()}


@cache
def schema() -> str:
    """The current schema."""
    return _text("schema.sql")


@cache
def postgres_schema() -> str:
    """The current schema for PostgreSQL."""
    return _text("postgres_schema.sql")


@cache
def postgres_migrations() -> Mapping[int, str]:
    """Migration scripts for PostgreSQL, by the version that they migrate to."""
    return _migrations("postgres_migrations")


@cache
def migrations() -> Mapping[int, str]:
    """Migration scripts, by the version that they migrate to; the first creates the original schema."""
    return _migrations("migrations")


def _migrations(folder_name: str) -> Mapping[int, str]:
    folder = resources.files("tokenmill.jobs.store") / "sql" / folder_name
    found = {
        int(match[1]): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if (match := _MIGRATION.fullmatch(item.name))
    }
    return dict(sorted(found.items()))


def newest() -> int:
    """The schema version that this program reads and writes."""
    return max(migrations())


def _named(file: str) -> Mapping[str, str]:
    parts = _NAME.split(_text(file))
    return {name: text.strip().rstrip(";") for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _text(name: str) -> str:
    return (resources.files("tokenmill.jobs.store") / "sql" / name).read_text(encoding="utf-8")
