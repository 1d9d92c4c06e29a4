"""Correct headers, and errors for every violation of the format."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.safetensors_folder import header, write_file, write_raw
from tokenmill.errors import CorruptModel, MissingSplit, ModelError
from tokenmill.model.huggingface.safetensors_header import MAX_TENSORS, StoredTensor, read_header


def declared(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_true_header(tmp_path: Path) -> None:
    table = {"a": ("BF16", [3, 5]), "b.weight": ("F8_E4M3", [2, 0, 4]), "scalar": ("F32", []), "half": ("F4", [2, 3])}
    raw, data = header(table, {"format": "pt"})
    found = read_header(write_raw(tmp_path / "x.safetensors", raw, data))
    assert found.data_offset == 8 + len(raw)
    assert found.file_bytes == 8 + len(raw) + 30 + 0 + 4 + 3
    assert [(e.name, e.stored, e.begin, e.end) for e in found.entries] == [
        ("a", StoredTensor("BF16", (3, 5)), 0, 30),
        ("b.weight", StoredTensor("F8_E4M3", (2, 0, 4)), 30, 30),
        ("scalar", StoredTensor("F32", ()), 30, 34),
        ("half", StoredTensor("F4", (2, 3)), 34, 37),
    ]


def test_offsets_of_unknown_types_are_accepted(tmp_path: Path) -> None:
    raw = json.dumps({"a": declared("F3_WOBBLE", [10], [0, 4])}).encode()
    assert read_header(write_raw(tmp_path / "x.safetensors", raw, 4)).entries[0].stored == StoredTensor(
        "F3_WOBBLE", (10,)
    )


def test_additional_fields_are_ignored(tmp_path: Path) -> None:
    raw = json.dumps({"a": declared() | {"checksum": "x"}}).encode()
    assert len(read_header(write_raw(tmp_path / "x.safetensors", raw, 2)).entries) == 1


ROW = b'"t%d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
WRONG: list[tuple[str, Any, int, str]] = [
    ("overlap", {"a": declared(), "b": declared(offsets=[1, 3])}, 3, "'b' overlaps"),
    ("gap", {"a": declared(), "b": declared(offsets=[3, 5])}, 5, "1 bytes before tensor 'b'"),
    ("same place", {"a": declared(), "b": declared()}, 2, "overlaps"),
    ("late start", {"a": declared(offsets=[4, 6])}, 6, "4 bytes before"),
    ("backwards", {"a": declared(offsets=[2, 0])}, 2, "'a' ends before"),
    ("size", {"a": declared("F32")}, 2, "'a' is F32 [2] but takes 2 bytes"),
    ("huge shape", {"a": declared(shape=[1 << 62, 1 << 62])}, 2, "but takes 2 bytes"),
    ("beyond numbers", {"a": declared(shape=[1 << 63])}, 2, "shape"),
    ("negative shape", {"a": declared(shape=[-2])}, 2, "shape"),
    ("shape of floats", {"a": declared(shape=[2.0])}, 2, "shape"),
    ("shape of truths", {"a": declared(shape=[True, True])}, 2, "shape"),
    ("shape of lists", {"a": declared(shape=[[2]])}, 2, "shape"),
    ("shape of words", {"a": declared(shape="2")}, 2, "shape"),
    ("long shape", {"a": declared(shape=[1] * 17)}, 2, "shape"),
    ("negative offset", {"a": declared(offsets=[-1, 1])}, 2, "data_offsets"),
    ("three offsets", {"a": declared(offsets=[0, 1, 2])}, 2, "data_offsets"),
    ("offset of words", {"a": declared(offsets=["0", "2"])}, 2, "data_offsets"),
    ("type of numbers", {"a": declared(3)}, 2, "dtype"),
    ("type of nothing", {"a": declared("")}, 2, "dtype"),
    ("long type", {"a": declared("F" * 33)}, 2, "dtype"),
    ("control characters in a type", {"a": declared("\x1b[2J")}, 2, "dtype"),
    ("no place", {"a": {"dtype": "U8", "shape": [2]}}, 2, "'a' lacks"),
    ("number for a tensor", {"a": 7}, 2, "'a' lacks"),
    ("nothing for a tensor", {"a": None}, 2, "'a' lacks"),
    ("no name", {"": declared()}, 2, "unprintable name"),
    ("control characters", {"a\x1b[2J": declared()}, 2, "unprintable name"),
    ("half a character", b'{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 2, "unprintable name"),
    ("long name", {"n" * 513: declared()}, 2, "unprintable name"),
    ("twice", b"{" + ROW % 0 + b"," + ROW % 0 + b"}", 2, "duplicate"),
    ("twice inside", b"{" + ROW.replace(b"[1]", b'[1],"shape":[1]') % 0 + b"}", 1, "duplicate"),
    ("cut JSON", b'{"a":{"dtype":"U8"', 2, "JSON"),
    ("not UTF-8", b'{"\xff":1}', 2, "JSON"),
    ("number with 5000 digits", b'{"a":' + b"9" * 5000 + b"}", 2, "JSON"),
    ("deep", b'{"a":' + b"[" * 100_000, 2, "JSON"),
    ("zero bytes", b"{" + b"\0" * 50, 2, "not a table of tensors"),
    ("bytes after the last", {"a": declared()}, 9, "7 bytes after its last tensor"),
]


@pytest.mark.parametrize(("content", "data", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_violations_of_the_format_are_refused(tmp_path: Path, content: Any, data: int, said: str) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = write_raw(tmp_path / "x.safetensors", raw, data)
    with pytest.raises(CorruptModel, match=r"x\.safetensors") as caught:
        read_header(path)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 30, -1])
@pytest.mark.parametrize(("split", "error"), [(False, CorruptModel), (True, MissingSplit)])
def test_a_file_truncated_anywhere_is_refused(tmp_path: Path, cut: int, split: bool, error: type[ModelError]) -> None:
    path = write_file(tmp_path / "x.safetensors", {"a": ("BF16", [30, 30])})
    os.truncate(path, path.stat().st_size + cut if cut < 0 else cut)
    with pytest.raises(error, match="truncated"):
        read_header(path, split=split)


def test_lengths_beyond_the_formats_limit_are_refused(tmp_path: Path) -> None:
    for length in (100_000_001, (1 << 64) - 1):
        with pytest.raises(CorruptModel, match="safetensors header"):
            read_header(write_raw(tmp_path / "x.safetensors", b"{}", length=length))


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n")
    with pytest.raises(MissingSplit, match="Git LFS pointer") as caught:
        read_header(path)
    assert caught.value.hint == "run: git lfs pull"


@pytest.mark.parametrize("content", [b"", b"GGUF" + b"\0" * 50, b"PK\3\4" + b"\0" * 50, b"<!doctype html>" * 9])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptModel):
        read_header(path)


def test_a_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CorruptModel, match="not a regular file"):
        read_header(tmp_path / "x.safetensors")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "x.safetensors")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: b'{"a":[' + b"1," * 30_000_000,
    "lists": lambda: b'{"a":[' + b"[]," * 20_000_000,
    "depth": lambda: b'{"a":' * 12_000_000,
    "one text": lambda: b'{"a":"' + b"x" * 60_000_000,
    "spaces": lambda: b"{" + b" " * 60_000_000,
    "digits": lambda: b'{"a":' + b"9" * 60_000_000,
    "tensors": lambda: b"{" + b",".join(ROW % number for number in range(MAX_TENSORS + 1000)) + b"}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_made_to_exhaust_memory_costs_nothing(tmp_path: Path, kind: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", HOSTILE[kind]())
    started = time.process_time()
    with pytest.raises(CorruptModel):
        read_header(path)
    assert time.process_time() - started < 0.5
