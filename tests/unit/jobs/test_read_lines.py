"""Job files as people have them: packed, cut off, with marks and blank lines, and lines that are wrong."""

import gzip
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.ingest.line import BLOCK_BYTES, ParseOptions, blocks, call_of, line_in, row, rows
from tokenmill.jobs.models import JobId
from tokenmill.storage.lines import LONGEST_LINE_BYTES, BadLine, Chunk, chunks, open_source, split

PLAIN = b'{"prompt": "a"}\n{"prompt": "b"}\n'
READING = ParseOptions(1, "m")


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb\n", [(1, "a"), (2, "b")]),
        (b"a\nb", [(1, "a"), (2, "b")]),
        (b"a\r\nb\r\n", [(1, "a"), (2, "b")]),
        (b"\n\na\n \t\r\nb\n", [(3, "a"), (5, "b")]),
        (b"\xef\xbb\xbfa\nb\n", [(1, "a"), (2, "b")]),
        (b"", []),
        (b"\n", []),
        (b"a\n\xffb\nc\n", [(1, "a"), BadLine(2, "not UTF-8: byte 0xff at position 1"), (3, "c")]),
        ("a\u2028b\x0bc\n".encode(), [(1, "a\u2028b\x0bc")]),  # only line feeds end a line
    ],
)
def test_lines_of_a_file(tmp_path: Path, data: bytes, expected: list[Any]) -> None:
    (tmp_path / "jobs.jsonl").write_bytes(data)
    assert list(job_lines(tmp_path / "jobs.jsonl")) == expected


@given(st.lists(st.sampled_from([b"", b"a", b"bb", b"c" * 40]), max_size=12), st.integers(1, 60))
def test_chunks_lose_nothing(parts: list[bytes], size: int) -> None:
    data = b"\n".join(parts)
    number = 1
    for chunk in chunks(pieces(data, size)):
        assert isinstance(chunk, Chunk)
        assert chunk.first == number
        assert data.startswith(chunk.data)
        data, number = data[len(chunk.data) :], number + chunk.data.count(b"\n")
    assert data == b""


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 10))
def test_long_lines_are_passed_over_and_the_rest_keeps_its_numbers(lengths: list[int], size: int) -> None:
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    found = [
        item
        for chunk in chunks(pieces(data, size), longest_bytes=20)
        for item in ([chunk] if isinstance(chunk, BadLine) else split(chunk))
    ]
    expected = [number if 0 < length <= 20 else -number for number, length in enumerate(lengths, 1) if length]
    assert [-item.number if isinstance(item, BadLine) else item[0] for item in found] == expected


def test_a_line_without_end_takes_bounded_memory() -> None:
    longest = 0

    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    for item in chunks(endless(), longest_bytes=5000):
        longest = max(longest, len(item.data) if isinstance(item, Chunk) else 0)
        assert isinstance(item, BadLine)
        assert "4.9 KiB" in item.reason
    assert longest == 0
    assert LONGEST_LINE_BYTES >= 1 << 20  # a prompt of a quarter of a million tokens


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    "packed",
    [
        PLAIN,
        gzip.compress(PLAIN, mtime=0),
        gzip.compress(PLAIN[:10], mtime=0) + gzip.compress(PLAIN[10:], mtime=0),
        zstd(PLAIN),
        zstd(PLAIN[:10]) + zstd(PLAIN[10:]),
    ],
    ids=["plain", "gzip", "gzip in two members", "zstd", "zstd in two frames"],
)
class TestPacked:
    def test_from_a_path_whatever_its_name(self, tmp_path: Path, packed: bytes) -> None:
        path = tmp_path / "jobs"
        path.write_bytes(packed)
        assert list(job_lines(path)) == [(1, '{"prompt": "a"}'), (2, '{"prompt": "b"}')]
        with open_source(path) as source:
            assert source.digest == hashlib.sha256(packed).hexdigest()

    def test_from_stdin(self, monkeypatch: pytest.MonkeyPatch, packed: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, packed)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
            with open_source("-") as source:
                assert source.digest is None
                found = [item for chunk in source.chunks() if isinstance(chunk, Chunk) for item in split(chunk)]
                assert found == [(1, '{"prompt": "a"}'), (2, '{"prompt": "b"}')]
                assert source.digest == hashlib.sha256(packed).hexdigest()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(PLAIN * 100, mtime=0)[:-20], "gzip data is damaged or ends early"),
        (gzip.compress(PLAIN, mtime=0)[:12] + b"\xff" * 30, "gzip data is damaged"),
        (zstd(PLAIN * 100)[:-5], "zstd data ends early"),
        (zstd(PLAIN)[:6] + b"\xff" * 30, "zstd data is damaged"),
        ("{}".encode("utf-16"), "/jobs is UTF-16"),
        (bytes(range(256)) * 8, "/jobs is not a text file"),
        (b"GGUF" + bytes(200), "/jobs is not a text file"),
        (b"PAR1 and no table", "the Parquet data cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "jobs").write_bytes(data)
    with pytest.raises(UsageError) as caught:
        list(job_lines(tmp_path / "jobs"))
    assert words in caught.value.message
    assert caught.value.hint


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        list(job_lines(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="cannot read"):
        list(job_lines(tmp_path))


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(PLAIN)
    with open_source(path) as source:
        path.write_bytes(PLAIN * 2)
        with pytest.raises(UsageError, match="changed"):
            list(source.chunks())


# Lines to rows.


@pytest.mark.parametrize(
    ("line", "custom_id", "reason"),
    [
        ("{", None, "not JSON: expecting property name"),
        ('{"prompt": "a"} x', None, "not JSON: unexpected data after the object at column 16"),
        ("[1]", None, "must be a JSON object (got [1])"),
        ('{"prompt": "a", "temperature": NaN}', None, "NaN is not a JSON number"),
        ("[" * 100_000, None, "nested too deeply"),
        ('{"prompt": ' + "1" * 5000 + "}", None, "an integer has more than 4300 digits"),
        ('{"custom_id": "x", "prompt": "\\ud800"}', "x", "surrogate"),
        ('{"custom_id": "\\ud800", "prompt": "a"}', None, "surrogate"),
        ('{"custom_id": 5, "prompt": "a"}', None, "custom_id must be"),
        ('{"custom_id": "", "prompt": "a"}', None, "custom_id must be"),
        ('{"custom_id": "x"}', "x", "messages or a prompt"),
        ('{"prompt": "a", "messages": []}', "line-7", "messages or a prompt"),
        ('{"custom_id": "x", "prompt": "a", "temp": 1}', "x", 'unknown key "temp" (did you mean'),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/images", "body": {}}', "x", "url must be /v1/chat"),
        ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "x", 'method must be "POST"'),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}', "x", "body must be an object"),
        (
            '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}, "seed": 1}',
            "x",
            'unknown key "seed"',
        ),
        (
            '{"custom_id": "x", "method": "POST", "url": ["/v1/completions"], "body": {"prompt": "a"}}',
            "x",
            "url must be",
        ),
    ],
)
def test_bad_lines_say_why_and_keep_their_name(line: str, custom_id: str | None, reason: str) -> None:
    found = row(line, 7, READING)
    assert reason in (found.message or "")
    assert (found.state, found.custom_id, found.code, JobId.line(found.id)) == (3, custom_id, "invalid_line", 7)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a"}',
        ' {"prompt": "\\u00e4\\u0000ä"}\t\r',
        '{"prompt": "\\ud83d\\ude00"}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "seed": 12345678901234567890123}',
        '{"prompt": "a", "temperature": 1e400}',
        "{",
        '{"prompt": "a", "temperature": -0.0, "top_p": 0.30000000000000004}',
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "min_p": Infinity}',
        '{"prompt": "a"}}',
        '{"prompt": "a\x01"}',
        "[]",
        "7",
        "null",
        '{"prompt": ' + "[" * 300 + "]" * 300 + "}",
        '{"prompt": ' + "1" * 5000 + "}",
        '{"prompt": 01}',
        '{"prompt": "a",}',
    ],
)
def test_a_line_of_a_chunk_has_the_row_that_it_has_alone(text: str) -> None:
    """The fast parser of chunks and the exact one agree."""
    (found,) = rows(Chunk(7, b"\n" + text.encode()), replace(READING, priority=2))
    with patch("tokenmill.jobs.ingest.line.from_json", side_effect=ValueError):
        assert found == row(text.strip(), 8, replace(READING, priority=2))


BATCH_LINE = '{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}}'


def test_both_forms_are_one() -> None:
    wrapped = row(BATCH_LINE, 1, READING)
    plain = row(
        '{"messages": [{"content": "a", "role": "user"}], "max_tokens": 5, "priority": 3, "deadline": 9}', 2, READING
    )
    assert wrapped.identity == plain.identity
    assert wrapped.place == plain.place
    assert (wrapped.custom_id, plain.custom_id) == ("x", "line-2")
    assert (wrapped.max_tokens, plain.rank, plain.deadline_s) == (5, -3, 9.0)
    assert wrapped.id == JobId.of(1, 1)


def test_defaults_fill_what_a_line_lacks() -> None:
    defaults = {"max_tokens": 9, "temperature": 0}
    reading = ParseOptions(1, "m", defaults=defaults)
    assert row('{"prompt": "a"}', 1, reading).max_tokens == 9
    assert row('{"prompt": "a", "max_tokens": 2}', 1, reading).max_tokens == 2
    assert (
        row('{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2}', 1, reading).max_tokens == 2
    )
    assert call_of('{"prompt": "a"}', defaults).request().max_tokens == 9
    assert (
        row('{"prompt": "a"}', 1, reading).identity
        == row('{"prompt": "a", "max_tokens": 9, "temperature": 0.0}', 1, READING).identity
    )


def test_without_reuse_no_two_lines_are_equal() -> None:
    reading = ParseOptions(1, "m", reuse=False)
    assert row('{"prompt": "a"}', 1, reading).identity != row('{"prompt": "a"}', 2, reading).identity
    assert row('{"prompt": "a"}', 1, reading).identity == row('{"prompt": "a"}', 1, reading).identity


def test_every_line_is_found_in_its_block() -> None:
    texts = [json.dumps({"prompt": f"{number} " + "x" * (number * 37 % 900)}) for number in range(1, 400)]
    texts[10], texts[50] = "", "y" * (BLOCK_BYTES + 5)
    chunk = Chunk(3, "\r\n".join(texts).encode() + b"\n")
    stored = dict(blocks(chunk, 2))
    assert b"".join(stored.values()) == chunk.data
    assert len(stored) > 3
    for number, text in enumerate(texts, 3):
        first = max(first for first in stored if first <= JobId.of(2, number))
        assert line_in(stored[first], JobId.of(2, number) - first) == text
    assert line_in(stored[max(stored)], 10_000) == ""


def test_rows_of_a_chunk() -> None:
    chunk = Chunk(5, b'{"prompt": "a"}\n\n\xff\n{"prompt": "b"}')
    found = list(rows(chunk, READING))
    assert [(JobId.line(item.id), item.state) for item in found] == [(5, 0), (7, 3), (8, 0)]
