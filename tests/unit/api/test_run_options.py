"""Options of a run: deadlines, stores, names of batches."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import submitted
from tokenmill.api.run_options import (
    RunArguments,
    RunOptions,
    SubmitArguments,
    WorkArguments,
    check_arguments,
    deadline_s,
)
from tokenmill.api.stores import find_batch, open_store, remember_last, store_address
from tokenmill.config import load
from tokenmill.errors import ConfigError, StoreError, UsageError
from tokenmill.jobs.store.store import Store

NOW_S = time.mktime((2026, 11, 15, 22, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("8h", (2026, 11, 16, 6, 30)),
        ("90m", (2026, 11, 16, 0, 0)),
        ("90 min", (2026, 11, 16, 0, 0)),
        ("1.5d", (2026, 11, 17, 10, 30)),
        ("23:15", (2026, 11, 15, 23, 15)),
        ("6:30", (2026, 11, 16, 6, 30)),  # the next one
        ("22:30", (2026, 11, 16, 22, 30)),
        ("2026-12-01T06:30", (2026, 12, 1, 6, 30)),
        ("2026-12-01 06:30", (2026, 12, 1, 6, 30)),
    ],
)
def test_times_are_read_as_people_write_them(text: str, local: tuple[int, int, int, int, int]) -> None:
    assert deadline_s(text, NOW_S) == time.mktime((*local, 0, 0, 0, -1))


def test_a_time_may_have_a_zone() -> None:
    assert deadline_s("2026-12-01T06:30:00+00:00", NOW_S) == 1796106600


def test_a_store_of_a_user_who_is_not_here_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "tokenmill.toml"
    config.write_text('store = "~no-such-user/batches"\n')
    with pytest.raises(ConfigError, match="~no-such-user/batches"):
        store_address(None, load(config))


@pytest.mark.parametrize("text", ["soon", "25:00", "12:99", "8x", "", "2026-13-01"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=repr(text)):
        deadline_s(text, NOW_S)


@pytest.mark.parametrize(
    ("text", "reason"), [("2020-01-01T00:00", "has passed"), ("0h", "has passed"), ("99999d", "hundred years")]
)
def test_deadlines_must_be_in_the_next_hundred_years(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        deadline_s(text, NOW_S)


def test_batches_are_found_by_name_by_its_beginning_and_as_the_last(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="no batches"):
            find_batch(store, "last")
        first, second = (submitted(store, tmp_path / f"{name}.jsonl", [name]) for name in "ab")
        assert find_batch(store, "last").name == second.name
        assert find_batch(store, first.name).name == first.name
        assert find_batch(store, first.name.removeprefix("batch_")[:12]).name == first.name
        assert find_batch(store, first.name[:18]).name == first.name
        with pytest.raises(UsageError, match="matches 2 batches"):
            find_batch(store, "batch_")
        with pytest.raises(UsageError, match="'zzz'"):
            find_batch(store, "zzz")


def test_last_is_the_batch_that_was_run_last(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with Store(folder) as store:
        first, second = (submitted(store, tmp_path / f"{name}.jsonl", [name]) for name in "ab")
        remember_last(folder, first)
        pointer = folder / "last_batch"
        os.utime(pointer, (second.created_s + 1, second.created_s + 1))
        assert find_batch(store, "last").name == first.name
        os.utime(pointer, (second.created_s - 1, second.created_s - 1))
        assert find_batch(store, "last").name == second.name  # created since
        pointer.write_text("batch_of_another_store")
        assert find_batch(store, "last").name == second.name


def test_a_deadline_may_be_a_value_of_datetime() -> None:
    assert deadline_s(timedelta(hours=8), NOW_S) == NOW_S + 8 * 3600
    assert deadline_s(datetime(2026, 12, 1, 6, 30, tzinfo=UTC), NOW_S) == 1796106600
    assert deadline_s(1796106600, NOW_S) == 1796106600


@pytest.mark.parametrize(
    "values",
    [
        {"attempts": 0},
        {"job_timeout_s": 0.0},
        {"priority": 10**9},
        {"defaults": {"prompt": "x"}},
        {"defaults": {"temperature": -1}},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunOptions(**values).check()


def test_a_store_is_read_while_another_has_it_open(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        open_store(tmp_path / "store")
    with Store(tmp_path / "store") as store:
        batch = submitted(store, tmp_path / "a.jsonl", ["a"])
        with open_store(tmp_path / "store") as read:
            assert [each.name for each in read.batches()] == [batch.name]
            assert read.batch().counts.pending == 1
            assert [*read.results()] == []
            with pytest.raises(UsageError):  # by the call, not by the first line
                read.results("nothing")
            assert str(tmp_path / "store") in repr(read)


@pytest.mark.parametrize(
    ("accepted", "name"),
    [
        (RunArguments, "output_file"),
        (SubmitArguments, "attempts"),
        (SubmitArguments, "on"),
        (WorkArguments, "deadline"),
        (WorkArguments, "output"),
        (WorkArguments, "temperature"),
    ],
)
def test_an_option_of_another_function_is_refused(accepted: type[Any], name: str) -> None:
    check_arguments({"context": 512}, accepted)
    with pytest.raises(UsageError, match=name):
        check_arguments({name: 1}, accepted)


def test_a_body_key_belongs_in_the_defaults() -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments({"temperature": 0}, RunArguments)
    assert "defaults=" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "options",
    [{"attempts": "3"}, {"attempts": True}, {"job_timeout_s": "5"}, {"priority": 1.5}, {"defaults": ["max_tokens"]}],
)
def test_a_value_of_the_wrong_type_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        RunOptions(**options).check()
