"""The header reader on correct, wrong and malicious files."""

import os
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, array, entry, header, tensors, text, value, write
from tokenmill.errors import CorruptModel, MissingSplit, ModelError, TokenmillError, UnknownModel
from tokenmill.model.gguf import MAX_KEPT_ARRAY_ITEMS, MAX_KEPT_ITEMS, LongArray, read_header, read_headers
from tokenmill.model.read import read
from tokenmill.units import MIB


def test_reads_keys_and_tensors(tmp_path: Path) -> None:
    keys = TINY_KEYS | {
        "a.float": 1.5,
        "a.bool": True,
        "a.i64": value(-5, 11),
        "a.short": array(4, [1, 2, 3]),
        "a.long": array(0, [7] * (MAX_KEPT_ARRAY_ITEMS + 1)),
        "a.strings": array(8, ["x", "yy", ""]),
    }
    found = read_header(write(tmp_path / "m.gguf", keys, TINY_TABLE))
    assert found.version == 3
    assert found.text("general.architecture") == "llama"
    assert found.integer("llama.block_count") == 2
    assert (found.keys["a.float"], found.keys["a.bool"], found.keys["a.i64"]) == (1.5, True, -5)
    assert found.keys["a.short"] == (1, 2, 3)
    long, strings = found.keys["a.long"], found.keys["a.strings"]
    assert isinstance(long, LongArray)
    assert isinstance(strings, LongArray)
    assert (long.count, long.bytes) == (MAX_KEPT_ARRAY_ITEMS + 1, MAX_KEPT_ARRAY_ITEMS + 1)
    assert (strings.count, strings.bytes) == (3, 3 * 8 + 3)
    assert [(t.name, t.shape, t.type) for t in found.tensors] == [(n, tuple(s), k) for n, s, k in TINY_TABLE]
    assert [t.bytes for t in found.tensors[:4]] == [12800, 256, 256, 64 * 64 // 32 * 34]
    assert found.data_offset % 32 == 0


def test_key_bytes_cover_the_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", "a.strings": array(8, ["x"] * 2000)}, [])
    where = read_header(path).key_bytes["a.strings"]
    raw = path.read_bytes()[where.offset : where.offset + where.bytes]
    assert raw == text("a.strings") + array(8, ["x"] * 2000)


def test_alignment_of_the_file_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TINY_KEYS | {"general.alignment": 128}, TINY_TABLE, alignment=128)
    found = read_header(path)
    assert found.alignment == 128
    assert all(t.offset % 128 == 0 for t in found.tensors)


def test_bytes_that_are_not_utf8_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": struct.pack("<I", 8) + text(b"ll\xffma")}, [])
    assert read_header(path).text("general.architecture") == "ll�ma"


GOOD = header(TINY_KEYS, tensors(TINY_TABLE)[0])
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "one byte": (b"G", "is not a GGUF"),
    "magic only": (b"GGUF", "ends inside the version"),
    "not a model": (b"hello there, this is a text file", "is not a GGUF"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "is not a GGUF"),
    "web page": (b"<!DOCTYPE html><html>", "is not a GGUF"),
    "version 1": (header({}, [], version=1), "version 1"),
    "version 9": (header({}, [], version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge key count": (header({}, [], key_count=1 << 60) + b"\0" * 64, "keys are impossible"),
    "huge tensor count": (header({}, [], tensor_count=1 << 60) + b"\0" * 64, "tensors are impossible"),
    "huge string": (header({"a": struct.pack("<IQ", 8, 1 << 62)}, []) + b"\0" * 64, "impossible length"),
    "string past the end": (header({"a": struct.pack("<IQ", 8, 1000)}, []) + b"\0" * 64, "ends inside a"),
    "huge array": (header({"a": struct.pack("<IIQ", 9, 10, 1 << 61)}, []) + b"\0" * 64, "ends inside a"),
    "huge string array": (header({"a": struct.pack("<IIQ", 9, 8, 1 << 61)}, []) + b"\0" * 64, "claims"),
    "array of arrays": (header({"a": struct.pack("<IIQ", 9, 9, 1)}, []) + b"\0" * 64, "array of arrays"),
    "unknown value type": (header({"a": struct.pack("<I", 77)}, []) + b"\0" * 64, "unknown type, 77"),
    "unknown element type": (header({"a": struct.pack("<IIQ", 9, 77, 1)}, []) + b"\0" * 64, "unknown type 77"),
    "same key twice": (header({}, [], key_count=2) + 2 * (text("a") + value(1)), "duplicate: a"),
    "empty key": (header({"": 1}, []), "empty"),
    "alignment zero": (header({"general.alignment": 0}, []), "not a power of two"),
    "alignment odd": (header({"general.alignment": 48}, []), "not a power of two"),
    "alignment text": (header({"general.alignment": "32"}, []), "not a power of two"),
    "no dimensions": (header({}, [entry("t", (), "F32", 0)]) + b"\0" * 64, "0 dimensions"),
    "nine dimensions": (header({}, [entry("t", (1,) * 9, "F32", 0)]) + b"\0" * 64, "9 dimensions"),
    "zero shape": (header({}, [entry("t", (4, 0), "F32", 0)]) + b"\0" * 64, "impossible shape"),
    "overflowing shape": (header({}, [entry("t", (1 << 40, 1 << 40), "F32", 0)]) + b"\0" * 64, "impossible shape"),
    "half a block": (header({}, [entry("t", (33,), "Q8_0", 0)]) + b"\0" * 64, "multiple of Q8_0's block"),
    "misaligned": (header({}, [entry("t", (1,), "F32", 4)]) + b"\0" * 64, "multiple of 32"),
    "overlap": (header({}, [entry("t", (64,), "F32", 0), entry("u", (1,), "F32", 32)]) + b"\0" * 999, "overlaps"),
    "same tensor twice": (header({}, [entry("t", (1,), "F32", 0)] * 2) + b"\0" * 99, "same name"),
    "data missing": (header({}, [entry("t", (1 << 20,), "F32", 0)]), "is truncated"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_errors_of_wrong_files_name_the_fault(case: str, tmp_path: Path) -> None:
    raw, message = BAD[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("cut", range(0, len(GOOD), 7))
def test_every_truncation_of_the_header_is_noticed(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD[:cut])
    with pytest.raises(CorruptModel):
        read_header(path)


def test_truncated_data_reports_the_missing_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TINY_KEYS, [("t", (1 << 20, 1 << 10), "F32")])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - (1 << 30))
    with pytest.raises(CorruptModel, match=r"1\.0 GiB") as caught:
        read_header(path)
    assert caught.value.hint is not None


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(ModelError):
        read_header(tmp_path)


def _hostile_sparse() -> dict[str, bytes]:
    zeros = struct.pack("<IIQ", 9, 8, (1 << 22) + 1)  # more empty strings than any vocabulary
    most = [text(f"k{n}") + struct.pack("<IIQ", 9, 0, 1024) + b"\0" * 1024 for n in range(4000)]
    return {
        "strings": header({"a": zeros}, []),
        "arrays": header({}, [], key_count=4000) + b"".join(most),
        "long key": header({}, [], key_count=1) + struct.pack("<Q", 65536),
    }


@pytest.mark.parametrize("case", ["strings", "arrays", "long key"])
def test_hostile_header_over_a_huge_hole_is_quick_and_small(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(_hostile_sparse()[case])
        file.truncate(1 << 40)
    tracemalloc.start()
    start = time.perf_counter()
    with suppress(TokenmillError):
        read_header(path)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5  # tracing slows it about tenfold
    assert peak < 100 << 20


def _splits(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    paths = []
    for number in range(count):
        keys = {
            "split.no": value(number, 2),
            "split.count": value(count, 2),
            "split.tensors.count": value(len(TINY_TABLE), 5),
        }
        keys = (dict(TINY_KEYS) if number == 0 else {}) | keys
        if number == changes.get("change"):
            keys |= changes["keys"]
        paths.append(write(folder / f"m-{number + 1:05}-of-{count:05}.gguf", keys, TINY_TABLE[number::count]))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_split_gives_all(given: int, tmp_path: Path) -> None:
    found = read_headers(_splits(tmp_path)[given])
    assert [header.source for header in found] == [str(path) for path in sorted(tmp_path.iterdir())]
    assert sum(len(header.tensors) for header in found) == len(TINY_TABLE)


def test_missing_split_is_named(tmp_path: Path) -> None:
    first, second, _ = _splits(tmp_path)
    second.unlink()
    with pytest.raises(MissingSplit, match="m-00002-of-00003.gguf is missing"):
        read_headers(first)


def test_truncated_split_is_named(tmp_path: Path) -> None:
    first, _, third = _splits(tmp_path)
    with third.open("r+b") as file:
        file.truncate(third.stat().st_size - 100)
    with pytest.raises(MissingSplit, match="m-00003-of-00003.gguf is truncated"):
        read_headers(first)


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (1, {"split.no": value(2, 2)}, "split.no 2, not 1"),
        (0, {"split.tensors.count": value(9, 5)}, "instead of 9"),
        (0, {"split.count": value(60_000, 2)}, "one of 60000 splits"),
    ],
)
def test_mixed_splits_are_detected(change: int, keys: dict[str, bytes], message: str, tmp_path: Path) -> None:
    first = _splits(tmp_path, change=change, keys=keys)[0]
    with pytest.raises(CorruptModel, match=message):
        read_headers(first)


def test_renamed_split(tmp_path: Path) -> None:
    renamed = _splits(tmp_path)[0].rename(tmp_path / "kimi.gguf")
    with pytest.raises(MissingSplit, match="-0000N-of-00003.gguf") as caught:
        read_headers(renamed)
    assert caught.value.hint


def test_sizes_of_unknown_types_are_distances_to_the_next_tensor(tmp_path: Path) -> None:
    entries = [entry("a", (256,), 999, 0), entry("b", (256, 2), 999, 96), entry("c", (8,), "F32", 352)]
    raw = header({"general.architecture": "llama"}, entries)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw + b"\0" * (-len(raw) % 32 + 352 + 32))
    found = read_header(path)
    assert [t.bytes for t in found.tensors] == [96, 256, 32]
    assert found.tensors[0].type == "type 999"
    assert "999" in found.guesses[0]


def test_ik_types_have_bytes_per_row(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TINY_KEYS, [("blk.0.ffn_up_exps.weight", (512, 64, 8), "IQ4_KS")])
    assert read_header(path).tensors[0].bytes == (2 * 136 + 4) * 64 * 8
    assert read_header(path).guesses == ()


def test_the_total_of_kept_arrays_is_limited(tmp_path: Path) -> None:
    keys = {f"a.{number}": array(10, range(1000)) for number in range(100)}
    found = read_header(write(tmp_path / "m.gguf", {"general.architecture": "llama", **keys}, []))
    kept = sum(len(item) for item in found.keys.values() if isinstance(item, tuple))
    assert kept == MAX_KEPT_ITEMS // 1000 * 1000
    assert isinstance(found.keys["a.99"], LongArray)


def test_skipping_long_strings_is_limited(tmp_path: Path) -> None:
    path, leap = tmp_path / "m.gguf", 5 * MIB
    with path.open("wb") as file:
        file.write(header({"a": struct.pack("<IIQ", 9, 8, 200)}, []))
        for _ in range(200):
            file.write(struct.pack("<Q", leap))
            file.seek(leap, os.SEEK_CUR)
        file.write(b"end")
    with pytest.raises(CorruptModel, match="256.0 MiB"):
        read_header(path)


def test_errors_show_only_the_start_of_a_long_key(tmp_path: Path) -> None:
    twice = text("k" * 60_000) + value(1)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + twice * 2)
    with pytest.raises(CorruptModel, match="duplicate: k+$") as caught:
        read_header(path)
    assert len(caught.value.message) < 300
    path = write(path, TINY_KEYS | {"general.alignment": "a" * 60_000}, [])
    with pytest.raises(CorruptModel, match="not a power of two") as caught:
        read_header(path)
    assert len(caught.value.message) < 300


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("name", ["a" * 300, "file/below", "", "ftp://host/model.gguf"])
def test_impossible_file_names_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ModelError if name.startswith(("a", "file")) else UnknownModel) as caught:
        read(name)
    assert caught.value.hint
