"""The folder of pulled models."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tokenmill.errors import ChecksumMismatch, NoSpace, PullError
from tokenmill.model.pull import locate, pulled
from tokenmill.model.pull.store import (
    check_space,
    disk_errors,
    drop_other_parts,
    is_whole,
    locked,
    part_of,
    read_note,
    sha256_of,
    write_note,
)

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def a_file(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_noted_file_is_whole_without_hashing(tmp_path: Path) -> None:
    path = a_file(tmp_path / "m.gguf")
    write_note(path, "m", EMPTY)  # a wrong hash, which only hashing detects
    assert is_whole(path, "m", EMPTY)


def test_verify_hashes_and_removes_what_is_damaged(tmp_path: Path) -> None:
    path = a_file(tmp_path / "m.gguf")
    write_note(path, "m", EMPTY)
    with pytest.raises(ChecksumMismatch, match="damaged") as caught:
        is_whole(path, "m", EMPTY, verify=True)
    assert caught.value.hint == "tokenmill models pull m"
    assert list(tmp_path.iterdir()) == []


def test_a_touched_file_is_hashed_again(tmp_path: Path) -> None:
    path = a_file(tmp_path / "m.gguf")
    write_note(path, "m", sha256_of(path))
    os.utime(path, ns=(1, 1))
    assert is_whole(path, "m", sha256_of(path))
    note = read_note(path)
    assert note is not None
    assert note.mtime_ns == 1  # the note was updated
    path.write_bytes(b"something else")
    assert not is_whole(path, "m", note.sha256)
    assert not path.exists()


def test_a_file_without_a_note_counts_if_its_hash_is_right(tmp_path: Path) -> None:
    path = a_file(tmp_path / "m.gguf")
    assert not is_whole(path, "m", None)  # nothing to compare with
    assert is_whole(path, "m", sha256_of(path))
    assert read_note(path) is not None
    assert not is_whole(tmp_path / "absent.gguf", "m", EMPTY)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}', '"x"', "null"])
def test_a_damaged_note_is_ignored(tmp_path: Path, text: str) -> None:
    path = a_file(tmp_path / "m.gguf")
    (tmp_path / "m.gguf.pulled.json").write_text(text)
    assert read_note(path) is None


def test_parts_of_other_versions_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "m[1].gguf"
    old, new = a_file(part_of(path, "a" * 64)), a_file(part_of(path, "b" * 64))
    neighbour = a_file(tmp_path / "m.gguf.aaaaaaaaaaaa.part")
    drop_other_parts(path, new)
    assert not old.exists()
    assert new.exists()
    assert neighbour.exists()


def test_errors_of_full_disks_have_sizes_and_a_hint(tmp_path: Path) -> None:
    check_space("m", tmp_path / "not" / "there" / "yet", 1, 0)
    with pytest.raises(NoSpace, match=r"m needs 1024\.0 TiB more in .* are free") as caught:
        check_space("m", tmp_path, 1 << 50, 0)
    assert "models_dir" in str(caught.value.hint)
    with pytest.raises(NoSpace):
        check_space("m", tmp_path, 0, 1 << 60)


def test_a_second_pull_waits_and_reports_it(tmp_path: Path) -> None:
    lines: list[str] = []
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def notify(text: str) -> None:
            lines.append(text)
            fcntl.flock(other, fcntl.LOCK_UN)

        with locked(tmp_path, "m", notify):
            assert len(lines) == 1
            assert "pulling m" in lines[0]
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    blocked = a_file(tmp_path / "file")
    with pytest.raises(PullError, match="cannot use") as caught, locked(blocked / "models", "m", print):
        pass
    assert "models_dir" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EROFS, PullError),
        (errno.EACCES, PullError),
        (errno.EIO, OSError),
    ],
)
def test_errors_of_the_disk(tmp_path: Path, number: int, expected: type[Exception]) -> None:
    with pytest.raises(expected), disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_the_listing_shows_complete_and_partial_models(tmp_path: Path) -> None:
    whole = a_file(tmp_path / "smollm2" / "S.gguf")
    write_note(whole, "smollm2", sha256_of(whole))
    folder = tmp_path / "owner" / "repo" / "Q4_0"
    first = a_file(folder / "m-00001-of-00003.gguf")
    write_note(first, "hf:owner/repo:Q4_0", None)
    a_file(part_of(folder / "m-00002-of-00003.gguf", EMPTY), b"abc")
    a_file(part_of(tmp_path / "owner" / "other" / "Q8_0" / "x.gguf", EMPTY), b"abcd")
    a_file(tmp_path / "mine.gguf")
    a_file(tmp_path / "notes.txt")
    rows = [(m.name, m.bytes, len(m.files), m.missing, m.partial_bytes, m.complete) for m in pulled(tmp_path)]
    assert rows == [
        ("hf:owner/other:Q8_0", 0, 0, 1, 4, False),
        ("hf:owner/repo:Q4_0", 7, 1, 2, 3, False),
        ("mine.gguf", 7, 1, 0, 0, True),
        ("smollm2", 7, 1, 0, 0, True),
    ]
    assert locate("smollm2", tmp_path) == whole
    assert locate("hf:owner/repo:Q4_0", tmp_path) is None  # not all of it
    assert pulled(tmp_path / "nothing") == ()
