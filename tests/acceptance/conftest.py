"""What several files of tests start from; one that needs it otherwise has its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.run_cli import SMALL, said, tokenmill


@pytest.fixture(scope="module")
def home(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder in which an engine runs that all tests of one file use."""
    folder = tmp_path_factory.mktemp("home")
    words = ("serve", "--engine-only", smollm2_path, *SMALL, "--no-warm", "--detach", "--name", "night")
    done = tokenmill(folder, *words)
    assert done.returncode == 0, done.stderr
    yield folder
    assert said(folder, "engines", "stop", "night").returncode == 0


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, Path]:
    """An option, and the folder of batches that it names."""
    return "--store", tmp_path / "batches"
