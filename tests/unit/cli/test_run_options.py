"""Options of jobs: times, defaults of bodies, names of batches."""

import time
from pathlib import Path

import pytest

from support.jobs_store import submitted
from tokenmill.cli.batches import find, worker_of
from tokenmill.cli.job_options import BodyOptions, moment_s, store_at
from tokenmill.cli.output import Common
from tokenmill.errors import ConfigError, UsageError
from tokenmill.jobs.store import Store

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
    assert moment_s(text, NOW_S) == time.mktime((*local, 0, 0, 0, -1))


def test_a_time_may_have_a_zone() -> None:
    assert moment_s("2026-12-01T06:30:00+00:00", NOW_S) == 1796106600


def test_a_store_of_a_user_who_is_not_here_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "tokenmill.toml"
    config.write_text('store = "~no-such-user/batches"\n')
    with pytest.raises(ConfigError, match="store: ~no-such-user/batches names a user that is not here"):
        store_at(None, Common(config=config))


@pytest.mark.parametrize("text", ["soon", "25:00", "12:99", "8x", "", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no time"):
        moment_s(text, NOW_S)


@pytest.mark.parametrize(
    ("text", "said"), [("2020-01-01T00:00", "is over"), ("0h", "is over"), ("99999d", "hundred years")]
)
def test_a_deadline_is_to_come(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        moment_s(text, NOW_S)


def test_defaults_of_bodies_are_checked_like_lines() -> None:
    assert BodyOptions().defaults() == {}
    assert BodyOptions(max_tokens=5, body='{"max_tokens": 9, "min_p": 0.1}').defaults() == {
        "max_tokens": 5,
        "min_p": 0.1,
    }
    for options, said in (
        (BodyOptions(temperature=-1), "temperature"),
        (BodyOptions(body='{"mesages": []}'), "unknown key"),
        (BodyOptions(body='{"prompt": "x"}'), "belongs into each"),
        (BodyOptions(body="{"), "not JSON"),
        (BodyOptions(body="3"), "not a JSON object"),
    ):
        with pytest.raises(UsageError, match=said):
            options.defaults()


def test_batches_are_found_by_name_by_its_beginning_and_as_the_last(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="there are no batches"):
            find(store, "last")
        first, second = (submitted(store, tmp_path / f"{name}.jsonl", [name]) for name in "ab")
        assert find(store, "last").name == second.name
        assert find(store, first.name).name == first.name
        assert find(store, first.name.removeprefix("batch_")[:12]).name == first.name
        assert find(store, first.name[:18]).name == first.name
        with pytest.raises(UsageError, match="could be 2 batches"):
            find(store, "batch_")
        with pytest.raises(UsageError, match="no batch is called 'zzz'"):
            find(store, "zzz")


def test_who_works_with_a_store_is_seen_without_touching_its_lock(tmp_path: Path) -> None:
    import os

    assert worker_of(tmp_path / "store") is None
    with Store(tmp_path / "store"):
        assert worker_of(tmp_path / "store") == os.getpid()
    assert worker_of(tmp_path / "store") is None
