"""Fixtures for tests of the Dagster integration."""

from collections.abc import Iterator

import pytest

from tokenmill.gateway import app
from tokenmill.gateway.batches import routes
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.monitoring import dashboard_api


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Poll batches often."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            app,
            "extra_groups",
            lambda state: (routes.route_group(state, BatchService(state, 0.02)), dashboard_api.route_group(state)),
        )
        yield
