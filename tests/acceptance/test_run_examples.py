"""The example jobs match the script that makes them, and every line is a valid job."""

import subprocess
import sys
from pathlib import Path

from tokenmill.cli import run
from tokenmill.jobs.ingest.line import ParseOptions, row
from tokenmill.jobs.models import State

JOBS = Path(__file__).parents[2] / "examples" / "jobs"


def test_the_example_is_what_its_maker_writes() -> None:
    made = subprocess.run([sys.executable, JOBS / "make_jobs.py"], capture_output=True, check=True).stdout
    assert (JOBS / "notes.jsonl").read_bytes() == made


def test_every_line_can_be_run_and_shares_its_head() -> None:
    lines = (JOBS / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row(line, number, ParseOptions(1, "m")) for number, line in enumerate(lines, 1)]
    assert len(rows) == 36
    assert {each.state for each in rows} == {State.PENDING}
    assert len({each.identity for each in rows}) == 36
    assert len({(each.place or b"")[:16] for each in rows}) == 1  # they share the first four chunks of the prefix
    assert run(["lint", str(JOBS / "notes.jsonl")]) == 0
