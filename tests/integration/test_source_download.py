"""Source distributions from the user's package index, by the real pip, without running any of their code."""

import io
import tarfile
from pathlib import Path

import pytest

from tokenmill.errors import PullError
from tokenmill.model.pull.index import download_source

SETUP = "raise SystemExit('setup.py was run')\n"
PROJECT = """\
[build-system]
requires = ["setuptools", "not-on-any-index"]
build-backend = "setuptools.build_meta"
[project]
name = "odd-source"
dynamic = ["version"]
"""


def write(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (("setup.py", SETUP), ("pyproject.toml", PROJECT)):
            member = tarfile.TarInfo(f"odd_source-1.5/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that takes the place of an index."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_it_is_downloaded_and_not_built(links: Path, tmp_path: Path) -> None:
    write(links / "odd_source-1.5.tar.gz")
    (tmp_path / "got").mkdir()
    found = download_source("odd-source==1.5", tmp_path / "got", lambda *_: None)
    assert found.read_bytes() == (links / "odd_source-1.5.tar.gz").read_bytes()
    assert list((tmp_path / "got").iterdir()) == [found]


def test_a_missing_version_is_an_error(links: Path, tmp_path: Path) -> None:
    write(links / "odd_source-1.5.tar.gz")
    with pytest.raises(PullError, match="odd-source==1.6"):
        download_source("odd-source==1.6", tmp_path, lambda *_: None)
