"""What tests with real files and processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.postgres import Cluster, cluster
from tokenmill.jobs.store.address import Address


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A server for all tests that want one; each uses a schema of its own."""
    with cluster() as started:
        yield started


@pytest.fixture(params=["folder", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    """Where a store can be: everything that holds for one holds for the other."""
    if request.param == "folder":
        return tmp_path / "s"
    server: Cluster = request.getfixturevalue("postgres")
    return server.fresh()
