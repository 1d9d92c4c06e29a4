"""Jobs for tune are read from a file that may have invalid lines."""

import json
from pathlib import Path

import pytest

from tokenmill.api.tune_options import requests_in
from tokenmill.errors import UsageError


def test_bad_jobs_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    bodies = [{"prompt": "a", "max_tokens": 4}, {"prompt": "b", "temperature": -5}, {"prompt": "c", "max_tokens": 0}]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    assert [request.prompt for request in requests_in(str(path))] == ["a"]
    path.write_text(json.dumps(bodies[1]) + "\n")
    with pytest.raises(UsageError):
        requests_in(str(path))
