"""Request fields on the command line, and the process that uses a store."""

import os
from pathlib import Path

import pytest

from tokenmill.cli.batches.workers import worker_of
from tokenmill.cli.options import BodyOptions
from tokenmill.errors import UsageError
from tokenmill.jobs.store.store import Store


def test_defaults_of_bodies_are_checked_like_lines() -> None:
    assert BodyOptions().defaults() == {}
    assert BodyOptions(max_tokens=5, body='{"max_tokens": 9, "min_p": 0.1}').defaults() == {
        "max_tokens": 5,
        "min_p": 0.1,
    }
    for options, said in (
        (BodyOptions(temperature=-1), "temperature"),
        (BodyOptions(body='{"mesages": []}'), "unknown key"),
        (BodyOptions(body='{"prompt": "x"}'), "prompt"),
        (BodyOptions(body="{"), "not JSON"),
        (BodyOptions(body="3"), "not a JSON object"),
    ):
        with pytest.raises(UsageError, match=said):
            options.defaults()


def test_who_works_with_a_store_is_seen_without_touching_its_lock(tmp_path: Path) -> None:
    assert worker_of(tmp_path / "store") is None
    with Store(tmp_path / "store"):
        assert worker_of(tmp_path / "store") == os.getpid()
    assert worker_of(tmp_path / "store") is None
