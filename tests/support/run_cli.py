"""Runs `tokenmill run` and related commands as processes with their own state folder."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenmill.cli import run
from tokenmill.errors import StoreError
from tokenmill.jobs.models import Counts
from tokenmill.jobs.store.reader import StoreReader

LIMIT_S = 250.0
USUAL_HOME = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
SMALL = ("--context", "1024", "--sequences", "4", "--threads", "1", "--threads-batch", "1")
DIGEST = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(12))
THINGS = ("river", "bridge", "harbour", "field", "engine", "tower", "garden", "mine", "road", "wall", "lake", "ship")


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "XDG_STATE_HOME": str(home)}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tokenmill", *map(str, words)]


def tokenmill(home: Path, *words: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    done = subprocess.run(
        command(*words), env=environment(home), input=stdin, capture_output=True, check=False, timeout=LIMIT_S
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def said(home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command to its end, in this process: for those that only look or refuse, whose start would take the longest."""
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(each, encoding="utf-8", write_through=True) for each in written)
    with patch.dict(os.environ, environment(home)), redirect_stdout(out), redirect_stderr(err):
        code = run([*map(str, words)])
    texts = (each.getvalue().decode() for each in written)
    return subprocess.CompletedProcess([*map(str, words)], code, *texts)


def ran_here(home: Path, *words: object) -> dict[str, Any]:
    """The totals of a run that ends well, in this process."""
    return _totals(said(home, "run", *words, "--json"))


def ran(home: Path, *words: object) -> dict[str, Any]:
    """The totals of a run that ends well."""
    return _totals(tokenmill(home, "run", *words, "--json"))


def _totals(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def begun(home: Path, *words: object) -> "subprocess.Popen[bytes]":
    """A run in the background; the caller ends it."""
    return subprocess.Popen(
        command("run", *words), env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def until(holds: Callable[[], bool]) -> None:
    """Another process gets that far; it is looked at again and again, for a few minutes at most."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def last_batch(store: Path) -> tuple[Counts, dict[int, bytes]]:
    """The counts of the newest batch and the bodies of its answers by line, as they are in the store now."""
    try:
        with StoreReader(store) as reader:
            batches = reader.batches()
            found = reader.results(batches[-1].id, 0, 100) if batches else []
            counts = batches[-1].counts if batches else Counts()
    except StoreError:  # it is not there yet
        return Counts(), {}
    return counts, {result.number: result.body for result in found if result.body is not None}


def job(name: str, text: str, **body: Any) -> dict[str, Any]:
    """An OpenAI batch line with the digest in front."""
    messages = [{"role": "system", "content": DIGEST}, {"role": "user", "content": text}]
    settings = {"messages": messages, "temperature": 0, "max_tokens": 6, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": settings}


def jobs(things: Sequence[str] = THINGS, **body: Any) -> list[dict[str, Any]]:
    return [job(f"{number:02}-{thing}", f"Say a word about a {thing}.", **body) for number, thing in enumerate(things)]


def slow_at_the_end() -> list[dict[str, Any]]:
    """Twelve jobs of which four take much longer than a look at what is done: whoever waits for others finds them
    at work."""
    lines = jobs(max_tokens=8, ignore_eos=True)
    for line in lines[8:]:
        line["body"]["max_tokens"] = 64
    return lines


def write(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Output lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(path: Path) -> list[str]:
    return [line["custom_id"] for line in read(path)]
