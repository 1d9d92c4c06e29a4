"""Replaced files: complete or as before, with the given mode, and no temporary file left behind."""

import os
import stat
from pathlib import Path

import pytest

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.storage.atomic import commit, new_file, replace_file, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["a.json"]


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["a.json"]


def test_readers_see_the_old_file_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    with replacing(path) as file:
        file.write(b"two")
        file.flush()
        assert path.read_bytes() == b"one"
        with replacing(path) as other:  # a concurrent writer has a temporary file of its own
            other.write(b"three")
        assert path.read_bytes() == b"three"
    assert path.read_bytes() == b"two"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_is_set_before_anything_is_written(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    with replacing(path, mode=mode) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == mode
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_named_temporary_file_that_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    part.write_bytes(b"a longer text that a killed process wrote")
    replace_file(tmp_path / "a", b"new", temporary=part)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_content_is_synced_before_the_name_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        sync(file)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    (tmp_path / "a.part").write_bytes(b"x")
    commit(tmp_path / "a.part", tmp_path / "a")
    assert calls == ["file", "rename", "folder"]


def test_a_file_that_the_user_named_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with new_file(path, force=False) as file:
        file.write(b"one")
    with pytest.raises(UsageError, match="exists"), new_file(path, force=False):
        pass
    with new_file(path, force=True) as file:
        file.write(b"two")
    assert path.read_bytes() == b"two"


def test_only_ordinary_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError), new_file(target, force=True):
            pass
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_missing_folder_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(TokenmillError) as caught, new_file(tmp_path / "none" / "a", force=False):
        pass
    assert caught.value.hint == "create the folder first"
