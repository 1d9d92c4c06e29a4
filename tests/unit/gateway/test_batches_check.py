"""Validation of batch input files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.gateway.batches.result_files import MAX_ERRORS, CheckedInput, check_input

URL = "/v1/completions"


def line(name: object = "a", *, without: str = "", **more: Any) -> str:
    given = {"custom_id": name, "method": "POST", "url": URL, "body": {"model": "m", "prompt": "p"}} | more
    return json.dumps({key: value for key, value in given.items() if key != without})


def checked(folder: Path, *lines: str | bytes) -> CheckedInput:
    path = folder / "jobs"
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else one.encode() for one in lines))
    return check_input(path, URL)


def test_a_good_file(tmp_path: Path) -> None:
    bad_body = line("c", body={"model": "m", "temprature": 1})  # the affair of its own line
    assert checked(tmp_path, line("a"), "", line("b"), bad_body) == CheckedInput("m", 3)
    assert checked(tmp_path, line("a", body={"prompt": "p"})) == CheckedInput(None, 1)


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        ("{", "invalid_json_line", "not JSON"),
        ("[1]", "invalid_json_line", "object"),
        (b"\xff{}", "invalid_json_line", "not UTF-8"),
        (line(without="custom_id"), "missing_required_parameter", "custom_id"),
        (line(7), "invalid_value", "custom_id"),
        (line("x" * 600), "invalid_value", "custom_id"),
        (line("first"), "duplicate_custom_id", "lines 1 and 2"),
        (line(without="method"), "missing_required_parameter", "method"),
        (line(without="url"), "missing_required_parameter", "url"),
        (line(without="body"), "missing_required_parameter", "body"),
        (line(method="GET"), "invalid_method", "POST"),
        (line(url="/v1/chat/completions"), "mismatched_endpoint", "/v1/completions"),
        (line(body=[]), "invalid_value", "body"),
        (line(body={"model": 5}), "invalid_value", "model"),
        (line(body={"model": "other"}), "mismatched_model", "other"),
        (line(body={}), "mismatched_model", "null"),
        (line(url="\ud800"), "mismatched_endpoint", "url"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, bad: str | bytes, code: str, words: str) -> None:
    found = checked(tmp_path, line("first"), bad, line("last"))
    (error,) = found.errors
    assert (error.line, error.code) == (2, code)
    assert words in error.message
    assert error.message.encode()


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "empty_file", ""),
        (b"\n\n", "empty_file", ""),
        (b"\x1f\x8b\x08 packed", "invalid_file", "gzip"),
        (b"\x28\xb5\x2f\xfd packed", "invalid_file", "zstd"),
        (b"PAR1", "invalid_file", "Parquet"),
        (b"\x00\x01\x02\x03" * 300, "invalid_file", "text"),
        (b"\xff\xfe{\x00}\x00", "invalid_file", "UTF-16"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, code: str, words: str) -> None:
    (error,) = checked(tmp_path, content).errors
    assert (error.code, error.line) == (code, None)
    assert words in error.message
    assert str(tmp_path) not in error.message


def test_the_number_of_reported_lines_is_limited(tmp_path: Path) -> None:
    assert len(checked(tmp_path, *["{"] * 300).errors) == MAX_ERRORS


def test_it_can_be_broken_off(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text(line("a"))
    assert check_input(tmp_path / "jobs", URL, should_continue=lambda: False).lines == 0
