"""The file of jobs that is made of a table, and where it goes."""

from pathlib import Path

import pytest

from tokenmill.cli.run_table import TableOptions
from tokenmill.errors import UsageError


@pytest.fixture
def options(tmp_path: Path) -> TableOptions:
    (tmp_path / "rows.csv").write_text("name,city\nAda,Wien\nBob,Graz\n")
    (tmp_path / "prompt.txt").write_text("Greet {name}.\n{*}")
    return TableOptions(table=tmp_path / "rows.csv", template=tmp_path / "prompt.txt")


def test_it_is_there_while_it_is_read_and_gone_after(options: TableOptions, tmp_path: Path) -> None:
    for _ in range(2):  # the same command again
        with options.opened(None, tmp_path / "batches") as source:
            assert len(Path(source).read_text().splitlines()) == 2
        assert not list((tmp_path / "batches").iterdir())


def test_a_refusal_leaves_nothing(options: TableOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an output of another"), options.opened(None, tmp_path / "batches"):
        raise UsageError("an output of another")
    assert not list((tmp_path / "batches").iterdir())


def test_what_others_have_there_stays(options: TableOptions, tmp_path: Path) -> None:
    other = tmp_path / "batches" / "tables" / "other.jsonl"
    other.parent.mkdir(parents=True)
    other.write_text("{}\n")
    with options.opened(None, tmp_path / "batches"):
        pass
    assert list(other.parent.iterdir()) == [other]


def test_a_file_that_was_given_is_not_touched(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("{}\n")
    with TableOptions().opened(str(jobs), tmp_path) as source:
        assert source == str(jobs)
    assert jobs.exists()


def test_what_is_not_there_is_said_before_a_model_is_pulled_for_it(options: TableOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read .*nofile.jsonl: No such file"):
        TableOptions().check(str(tmp_path / "nofile.jsonl"))
    TableOptions().check("-")
    (tmp_path / "rows.csv").unlink()
    with pytest.raises(UsageError, match="cannot read .*rows.csv: No such file"):
        options.check(None)
