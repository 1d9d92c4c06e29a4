"""The file of a saved prefix: it is read back unchanged, and other files are refused."""

import errno
import os
from mmap import mmap
from pathlib import Path

import pytest

from tokenmill.errors import EngineError, ForeignState
from tokenmill.native.llama import state_file

MINE = {"model": "abc", "cache_type_k": "f16"}
TOKENS = [1, 2, 300_000]
STATE = bytes(range(256)) * 40


def fill(mapped: mmap, offset: int) -> None:
    mapped[offset : offset + len(STATE)] = STATE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "deep" / "digest.head"
    assert state_file.write(made, MINE, TOKENS, len(STATE), fill) == made.stat().st_size
    return made


def test_what_was_saved_comes_back(path: Path) -> None:
    with state_file.opened(path, MINE) as head:
        assert (head.tokens, bytes(head.state), head.identity) == (tuple(TOKENS), STATE, MINE)
    assert [entry.name for entry in path.parent.iterdir()] == ["digest.head"]


def test_saving_again_takes_the_place_of_the_former(path: Path) -> None:
    state_file.write(path, MINE, [7], len(STATE), fill)
    with state_file.opened(path, MINE) as head:
        assert head.tokens == (7,)


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ({"model": "xyz", "cache_type_k": "f16"}, "model 'abc'.*'xyz'"),
        ({"model": "abc", "cache_type_k": "q8_0"}, "cache_type_k 'f16'.*'q8_0'"),
        ({"model": "abc"}, "cache_type_k 'f16'.*None"),
        ({**MINE, "build": "9"}, "build None.*'9'"),
    ],
)
def test_the_prefix_of_something_else_is_refused(path: Path, mine: dict[str, str], told: str) -> None:
    with pytest.raises(ForeignState, match=told), state_file.opened(path, mine):
        pass


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 4096])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.head"
    path.write_bytes(content)
    with pytest.raises(ForeignState, match=path.name), state_file.opened(path, MINE):
        pass


def test_a_file_of_a_later_version_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[16] = 9
    path.write_bytes(data)
    with pytest.raises(ForeignState, match="version 9"), state_file.opened(path, MINE):
        pass


def test_any_flipped_byte_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for place in (20, 23, 30, len(whole) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 0x41
        path.write_bytes(data)
        with pytest.raises(EngineError), state_file.opened(path, MINE):
            pass


@pytest.mark.parametrize("left", [24, 30, 200, -1, -40])
def test_a_file_cut_short_is_noticed(path: Path, left: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    with pytest.raises(EngineError, match=path.name) as caught, state_file.opened(path, MINE):
        pass
    assert not isinstance(caught.value, ForeignState)


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"), state_file.opened(tmp_path / "none", MINE):
        pass


def test_a_full_disk_leaves_the_former_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left") as caught:
        state_file.write(path, MINE, [9], len(STATE), fill)
    assert caught.value.hint == "it needs 1 MiB there"
    assert [entry.name for entry in path.parent.iterdir()] == ["digest.head"]
    with state_file.opened(path, MINE) as head:
        assert head.tokens == tuple(TOKENS)


def test_a_state_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    def broken(_mapped: mmap, _offset: int) -> None:
        raise EngineError("no state")

    with pytest.raises(EngineError, match="no state"):
        state_file.write(tmp_path / "x.head", MINE, TOKENS, 10, broken)
    assert list(tmp_path.iterdir()) == []
