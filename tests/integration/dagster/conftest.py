"""Gateways for tests of Dagster."""

from collections.abc import Iterator

import pytest

from tokenmill.gateway import api, app, batches


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Batches are looked at often."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "parts", lambda state: (batches.part(state, tick_s=0.02), api.page_part(state)))
        yield
