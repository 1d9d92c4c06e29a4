"""One real Ray cluster for all tests of this folder: a head that does no work, and three nodes."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ray_cluster import RayCluster, ray_cluster


@pytest.fixture(scope="session")
def ray_home() -> Iterator[Path]:
    """A short path, for Ray makes sockets in it and the kernel takes no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="tm-ray-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster(ray_home: Path, smollm2_path: Path) -> Iterator[RayCluster]:
    """Needs the model because every node would pull it for itself."""
    with ray_cluster(3, ray_home, ray_home / "state") as started:
        yield started
