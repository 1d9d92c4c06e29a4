"""What the tests of a store on a server have in common."""

import pytest

from tokenmill.jobs import leases


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed when a test says so, and not beside it."""
    monkeypatch.setattr(leases, "_keep", lambda *_: None)
