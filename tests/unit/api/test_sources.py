"""Jobs in any form become job files."""

import json
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pytest

from tokenmill.api.sources import JobSource
from tokenmill.errors import UsageError

ROWS = [{"name": "Ada", "city": "Wien"}, {"name": "Bob", "city": "Graz"}]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("name,city\nAda,Wien\nBob,Graz\n")
    return path


def lines_of(source: JobSource, folder: Path) -> list[Any]:
    with source.as_file(folder) as file:
        found = [json.loads(line) for line in Path(file.path).read_text().splitlines()]
    assert not folder.exists() or not list(folder.iterdir())  # nothing is left behind
    return found


def users(lines: list[Any]) -> list[str]:
    return [line["messages"][-1]["content"] for line in lines]


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("{}\n")
    with JobSource(jobs).as_file(tmp_path / "folder") as file:
        assert (file.path, file.name) == (str(jobs), None)
    assert not (tmp_path / "folder").exists()


def test_strings_are_user_messages_and_dicts_stay(tmp_path: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 3}
    found = lines_of(JobSource(iter(["Say hello.", body])), tmp_path / "folder")
    assert found == [{"messages": [{"role": "user", "content": "Say hello."}]}, body]


def test_equal_jobs_give_equal_bytes(tmp_path: Path) -> None:
    written = []
    for _ in range(2):
        with JobSource(["a", {"prompt": "b"}]).as_file(tmp_path) as file:
            written.append(Path(file.path).read_bytes())
    assert written[0] == written[1]


def test_a_table_file_goes_through_a_template(table: Path, tmp_path: Path) -> None:
    source = JobSource(table, "Greet {name}.\n{*}", system="Be kind to {city}.", key="name")
    found = lines_of(source, tmp_path / "folder")
    assert users(found) == ["Greet Ada.\n", "Greet Bob.\n"]
    assert [line["custom_id"] for line in found] == ["Ada", "Bob"]
    assert found[0]["messages"][0] == {"role": "system", "content": "Be kind to Wien."}


def test_templates_may_be_files(table: Path, tmp_path: Path) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text("Greet {name} of {city}.")
    assert users(lines_of(JobSource(table, template), tmp_path / "folder"))[1] == "Greet Bob of Graz."


def test_dicts_pandas_polars_and_pyarrow_give_the_same_jobs(table: Path, tmp_path: Path) -> None:
    tables = [pandas.DataFrame(ROWS), polars.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS)]
    forms: list[Any] = [table, iter(ROWS), *tables]
    found = [lines_of(JobSource(form, "Greet {name} of {city}."), tmp_path / "folder") for form in forms]
    assert users(found[0]) == ["Greet Ada of Wien.", "Greet Bob of Graz."]
    assert all(each == found[0] for each in found)


def test_a_refusal_leaves_nothing(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an output of another"), JobSource(table, "{*}").as_file(tmp_path / "folder"):
        raise UsageError("an output of another")
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("jobs", [3, None, {"prompt": "x"}, [3], [b"bytes"], [{"prompt": {1, 2}}]])
def test_other_values_are_refused(jobs: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError), JobSource(jobs).as_file(tmp_path):
        pass


def test_a_table_without_an_arrow_interface_is_refused(tmp_path: Path) -> None:
    class OldFrame(list[str]):
        columns = ("city",)

    with pytest.raises(UsageError), JobSource(OldFrame(["city"]), template="{city}").as_file(tmp_path):
        pass


@pytest.mark.parametrize(
    "source",
    [
        JobSource(["a"], system="x"),
        JobSource(["a"], key="x"),
        JobSource(["a"], layout="shortest"),  # type: ignore[arg-type]
        JobSource(["not a row"], template="{*}"),
    ],
)
def test_options_that_do_not_go_together_are_refused(source: JobSource, tmp_path: Path) -> None:
    with pytest.raises(UsageError), source.as_file(tmp_path):
        pass


def test_a_missing_file_is_refused_before_anything_else_is_done(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read .*nofile.jsonl: No such file"):
        JobSource(tmp_path / "nofile.jsonl").check()
    with pytest.raises(UsageError) as caught:
        JobSource("Say hello to me.").check()
    assert "list" in (caught.value.hint or "")
    JobSource("-").check()


def test_only_the_first_jobs(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}\n')
    assert lines_of(JobSource(jobs, limit=2), folder) == [{"prompt": "a"}, {"prompt": "b"}]
    assert len(lines_of(JobSource(jobs, limit=9), folder)) == 3
    assert len(lines_of(JobSource(["x", "y"], limit=1), folder)) == 1
    template = "Greet {name}."
    every = users(lines_of(JobSource(table, template), folder))
    assert users(lines_of(JobSource(table, template, limit=1), folder)) == every[:1]
    with JobSource(jobs, limit=1).as_file(folder) as file:
        assert file.name == str(jobs)
    with pytest.raises(UsageError, match="at least 1"):
        JobSource(jobs, limit=0).check()
