"""A state folder with a batch in it and an engine that runs, for all contracts that need one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import SMALL, job, said, tokenmill, write

LINES: list[dict[str, Any] | str] = [
    job("chat", "Say a word about a river."),
    {"custom_id": "text", "prompt": "One, two,", "max_tokens": 3, "temperature": 0, "logprobs": 1},
    job("unknown key", "Say yes.", temprature=0),
    job("too long", "word " * 3000),
    "{not json",
]


@pytest.fixture(scope="session")
def home(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An engine called `night`, and a batch that it worked on, with results and errors apart."""
    home = tmp_path_factory.mktemp("home")
    words = ("serve", "--engine-only", smollm2_path, *SMALL, "--no-warm", "--detach", "--name", "night", "--json")
    started = tokenmill(home, *words)
    assert started.returncode == 0, started.stderr
    (home / "serve.json").write_text(started.stdout)
    jobs = write(home / "jobs.jsonl", LINES)
    done = said(home, "run", jobs, "-o", home / "results.jsonl", "--errors", home / "errors.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    (home / "run.json").write_text(done.stdout)
    yield home
    assert said(home, "engines", "stop", "night").returncode == 0
