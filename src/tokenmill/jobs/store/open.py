"""Opens the database of a store: SQLite for a folder, PostgreSQL for a URL."""

from pathlib import Path

from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.backend import AccessMode, DatabaseBackend, Shutdown
from tokenmill.jobs.store.sqlite import FILE, Database


def opened(address: Address, mode: AccessMode, shutdown: Shutdown | None = None) -> DatabaseBackend:
    """Open the database of a store; `shutdown` ends waiting for an unavailable server."""
    if isinstance(address, Path):
        return Database(address, mode)
    from tokenmill.jobs.store.postgres import Postgres  # noqa: PLC0415  its driver is an extra

    return Postgres(address, mode, shutdown or Shutdown())


def has_batches(address: Address) -> bool:
    """Whether a store was ever created there."""
    if isinstance(address, Path):
        return (address / FILE).is_file()
    from tokenmill.jobs.store.postgres import has_tables  # noqa: PLC0415  its driver is an extra

    return has_tables(address)
