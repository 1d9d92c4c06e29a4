"""A real Ray cluster for all tests of this folder: a Ray head without engines, and three nodes."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ray_cluster import RayCluster, ray_cluster


@pytest.fixture(scope="session")
def ray_home() -> Iterator[Path]:
    """A short path, because Ray creates sockets in it and their paths are limited."""
    folder = Path(tempfile.mkdtemp(prefix="tm-ray-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster(ray_home: Path, smollm2_path: Path) -> Iterator[RayCluster]:
    """Depends on the model so that it is downloaded only once."""
    with ray_cluster(3, ray_home, ray_home / "state") as started:
        yield started
