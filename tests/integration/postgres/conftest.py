"""What the tests of a store on a server have in common."""

from collections.abc import Iterator

import pytest

from support.postgres import Cluster
from tokenmill.jobs.sharding import worker_lease
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed when a test says so, and not beside it."""
    monkeypatch.setattr(worker_lease, "_renew_until_left", lambda *_: None)


@pytest.fixture
def server(postgres: Cluster) -> PostgresAddress:
    """A database that nobody has used."""
    return postgres.fresh()


@pytest.fixture
def store(server: PostgresAddress) -> Iterator[Store]:
    """A store in it."""
    with Store(server) as opened:
        yield opened
