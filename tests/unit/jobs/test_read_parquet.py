"""Tables of jobs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.ingest.line import ParseOptions, row
from tokenmill.storage.lines import BadLine


def table(tmp_path: Path, columns: dict[str, Any]) -> Path:
    path = tmp_path / "jobs.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_prompts_with_settings(tmp_path: Path) -> None:
    path = table(
        tmp_path, {"custom_id": ["a", "b"], "prompt": ["x", "y"], "temperature": [0.5, None], "max_tokens": [3, 4]}
    )
    found = [item for item in job_lines(path) if not isinstance(item, BadLine)]
    assert [json.loads(text) for _, text in found] == [
        {"custom_id": "a", "prompt": "x", "temperature": 0.5, "max_tokens": 3},
        {"custom_id": "b", "prompt": "y", "max_tokens": 4},
    ]
    assert [number for number, _ in found] == [1, 2]
    assert all(row(text, number, ParseOptions(1, "m")).state == 0 for number, text in found)


def test_messages_as_lists_and_as_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi", "name": None}]
    lists = pa.array(
        [messages], pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    )
    for column in (lists, [json.dumps(messages)]):
        ((number, text),) = job_lines(table(tmp_path, {"messages": column}))
        assert (
            row(str(text), int(number), ParseOptions(1, "m")).identity
            == row(json.dumps({"messages": messages}), 1, ParseOptions(1, "m")).identity
        )


def test_openai_form(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        {
            "custom_id": ["a"],
            "method": ["POST"],
            "url": ["/v1/completions"],
            "body": ['{"prompt": "x"}'],
        },
    )
    ((_, text),) = job_lines(path)
    assert row(str(text), 1, ParseOptions(1, "m")).custom_id == "a"


def test_maps(tmp_path: Path) -> None:
    bias = pa.array([[("5", 1.0)]], pa.map_(pa.string(), pa.float64()))
    ((_, text),) = job_lines(table(tmp_path, {"prompt": ["x"], "logit_bias": bias}))
    assert json.loads(str(text)) == {"prompt": "x", "logit_bias": {"5": 1.0}}


def test_bad_rows_keep_their_numbers(tmp_path: Path) -> None:
    column = ['[{"role": "user", "content": "a"}]', "[", '[{"role": "user", "content": "b"}]']
    found = list(job_lines(table(tmp_path, {"messages": column})))
    assert [item[0] for item in found] == [1, 2, 3]
    assert isinstance(found[1], BadLine)
    assert "messages is not JSON" in found[1].reason


@pytest.mark.parametrize(("column", "hint"), [("promt", "'prompt'"), ("source_page", "remove the column")])
def test_columns_that_mean_nothing_are_named(tmp_path: Path, column: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        list(job_lines(table(tmp_path, {"prompt": ["x"], column: ["y"]})))
    assert column in caught.value.message
    assert hint in (caught.value.hint or "")


def test_large_tables_come_in_chunks(tmp_path: Path) -> None:
    found = list(job_lines(table(tmp_path, {"prompt": [f"p{number}" for number in range(3000)]})))
    assert [item[0] for item in found] == list(range(1, 3001))
    assert json.loads(str(found[2999][1])) == {"prompt": "p2999"}
