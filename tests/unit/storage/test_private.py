"""Folders and files of the state that other users must not read."""

import stat
from pathlib import Path

import pytest

from tokenmill.api.stores import keep_private
from tokenmill.config import Config
from tokenmill.jobs.store.store import Store
from tokenmill.storage.private import make_private, private_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folders_and_their_missing_parents_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path / "state" / "batches")
    assert [mode(tmp_path / "state"), mode(tmp_path / "state" / "batches")] == [0o700, 0o700]
    assert mode(tmp_path) == 0o755


def test_a_new_store_is_private_with_its_log(tmp_path: Path) -> None:
    store = Store(tmp_path / "batches")
    found = {path.name: mode(path) for path in (tmp_path / "batches").iterdir()}
    store.close()
    assert mode(tmp_path / "batches") == 0o700
    assert set(found.values()) == {0o600}
    assert "store.db-wal" in found


def test_state_of_an_older_version_is_mended_once(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    Store(tmp_path / "batches").close()
    tmp_path.chmod(0o755)
    (tmp_path / "batches").chmod(0o755)
    (tmp_path / "batches" / "store.db").chmod(0o644)
    (tmp_path / "engines").mkdir(mode=0o755)
    keep_private(config)
    assert [mode(tmp_path / name) for name in ("batches", "engines", "batches/store.db")] == [0o700, 0o700, 0o600]
    assert mode(tmp_path) == 0o755  # chosen by the user, who may keep other things there
    assert make_private([tmp_path / "batches", tmp_path / "engines"]) == ()


def test_the_default_state_folder_itself_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "tokenmill").mkdir(mode=0o755)
    keep_private(Config())
    assert mode(tmp_path / "tokenmill") == 0o700


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert make_private([tmp_path / "link", tmp_path / "missing"]) == ()
    assert mode(tmp_path / "target") == 0o755
