"""Ghosts on disk: small, with correct headers, never partial, from names, files and splits."""

import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, array, value, write
from tokenmill.errors import TokenmillError, UnknownModel, UsageError
from tokenmill.model.gguf import read_header
from tokenmill.model.synthetic import generate, ghost
from tokenmill.units import GIB, MIB

KEYS = {**TINY_KEYS, "tiny.list": array(5, [1, -2, 3]), "tokenizer.ggml.tokens": array(8, ["a", "b", "ü"])}


def _raw(path: Path, key: str) -> bytes:
    place = read_header(path).key_bytes[key]
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.bytes)


def test_a_trillion_parameters_take_a_few_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "kimi.gguf"
    written = ghost.write("kimi-k2.5:Q4_K_S", path)
    status = path.stat()
    assert status.st_size == written.apparent_bytes
    assert 542 * GIB < status.st_size < 543 * GIB
    assert status.st_blocks * 512 == written.disk_bytes < 8 * MIB
    assert written.parameters > 10**12
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists") as caught:
        ghost.write("qwen3-32b:Q4_K_M", path)
    assert path.read_bytes() == b"precious"
    assert "--force" in str(caught.value.hint)
    ghost.write("qwen3-32b:Q4_K_M", path, force=True)
    assert read_header(path).text("general.name") == "Qwen3-32B"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenmillError, match="cannot write"):
        ghost.write("qwen3-32b:Q4_K_M", tmp_path / "no" / "ghost.gguf")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        ghost.write("qwen3-32b:Q4_K_M", tmp_path, force=True)


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        ghost.write("qwen3-32b:Q4_K_M", tmp_path / "pipe", force=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["file/ghost.gguf", "g" * 300])
def test_a_name_that_cannot_be_written_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TokenmillError, match="cannot write") as caught:
        ghost.write("qwen3-32b:Q4_K_M", tmp_path / name)
    assert caught.value.hint


def test_a_ghost_never_overwrites_its_model(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model.gguf", KEYS, TINY_TABLE), tmp_path / "link.gguf"
    before = model.read_bytes()
    other.symlink_to(model)
    for target in (model, other):
        with pytest.raises(UsageError, match="is the model itself"):
            ghost.write(str(model), target, force=True)
    assert model.read_bytes() == before


@pytest.fixture
def largest_file() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB, hard))
    yield GIB
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("largest_file")
def test_a_file_system_with_a_size_limit_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TokenmillError, match="cannot hold a file of") as caught:
        ghost.write("qwen3-32b:Q4_K_M", tmp_path / "ghost.gguf")
    assert "sparse" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_sparse_files_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghost, "MAX_DISK_BYTES", -GIB)  # every file now looks fully allocated
    with pytest.raises(TokenmillError, match="sparse"):
        ghost.write("qwen3-32b:Q4_K_M", tmp_path / "ghost.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_copied_header_keeps_every_key_byte_for_byte(tmp_path: Path) -> None:
    source = write(tmp_path / "tiny.gguf", KEYS, TINY_TABLE)
    target = tmp_path / "ghost.gguf"
    ghost.write(str(source), target)
    before, after = read_header(source), read_header(target)
    assert {t.name: (t.shape, t.type, t.bytes) for t in after.tensors} == {
        t.name: (t.shape, t.type, t.bytes) for t in before.tensors
    }
    assert set(after.keys) == {*before.keys, "tokenmill.ghost"}
    for key in before.keys:
        assert _raw(target, key) == _raw(source, key)
    assert target.stat().st_size >= source.stat().st_size


def test_a_ghost_of_a_ghost_is_the_same_ghost(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{number}.gguf" for number in range(3))
    ghost.write("qwen3-32b:Q4_K_M", first)
    ghost.write(str(first), second)
    ghost.write(str(second), third)
    length = read_header(second).data_offset
    with second.open("rb") as left, third.open("rb") as right:
        assert left.read(length) == right.read(length)
    assert second.stat().st_size == third.stat().st_size == first.stat().st_size


def test_weights_are_not_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "model.gguf", tmp_path / "ghost.gguf"
    generate.write("dense", generate.sizes("dense", {}), source)
    written = ghost.write(str(source), target)
    assert written.disk_bytes < MIB < source.stat().st_blocks * 512
    with target.open("rb") as file:
        file.seek(read_header(target).data_offset)
        assert set(file.read()) == {0}


@pytest.mark.parametrize("alignment", [32, 256])
def test_splits_become_one_file(tmp_path: Path, alignment: int) -> None:
    halves = (TINY_TABLE[:3], TINY_TABLE[3:])
    for number, table in enumerate(halves):
        keys = (KEYS if number == 0 else {}) | {
            "general.alignment": alignment,
            "split.no": value(number, 2),
            "split.count": value(2, 2),
            "split.tensors.count": value(len(TINY_TABLE), 5),
        }
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", keys, table, alignment=alignment)
    target = tmp_path / "ghost.gguf"
    ghost.write(str(tmp_path / "m-00002-of-00002.gguf"), target)
    header = read_header(target)
    assert [tensor.name for tensor in header.tensors] == [row[0] for row in TINY_TABLE]
    assert not [key for key in header.keys if key.startswith("split.")]
    assert header.alignment == alignment
    assert all(tensor.offset % alignment == 0 for tensor in header.tensors)


def test_types_of_other_engines_are_copied(tmp_path: Path) -> None:
    source = write(
        tmp_path / "ik.gguf",
        TINY_KEYS,
        [("blk.0.ffn_up.weight", (256, 8), "IQ4_KS"), ("output.weight", (64, 8), "Q6_0")],
    )
    ghost.write(str(source), tmp_path / "ghost.gguf")
    assert [tensor.type for tensor in read_header(tmp_path / "ghost.gguf").tensors] == ["IQ4_KS", "Q6_0"]


def test_other_files_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_bytes(struct.pack("<4sI", b"nope", 3))
    with pytest.raises(TokenmillError, match="not a GGUF"):
        ghost.write(str(tmp_path / "notes.gguf"), tmp_path / "ghost.gguf")
    with pytest.raises(UnknownModel):
        ghost.write(str(tmp_path / "absent.gguf"), tmp_path / "ghost.gguf")
    assert not (tmp_path / "ghost.gguf").exists()
