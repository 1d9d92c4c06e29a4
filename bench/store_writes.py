"""Bytes that the store writes for each job, through the calls and in the order of the worker.

    python bench/store_writes.py [--jobs 300] [--line-bytes 1000] [--answer-bytes 400] [--slots 8] [--folder DIR]
    python bench/store_writes.py --model MODEL.gguf [--jobs 300] [--slots 8]

The first form needs no engine: it submits a file, keeps `slots` jobs in flight and commits made-up answers in groups of
1, 2, 4 and 8. The bytes are those of all write system calls of the process (`wchar` in /proc/self/io), which are the
write-ahead log, checkpoints and the lock file. The second form runs `tokenmill run` on a real model and counts bytes
that reached the disk (`write_bytes`), output file included. Prints one JSON document.
"""

import argparse
import json
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from tokenmill import cli
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import FinishedJob, Submission
from tokenmill.jobs.store.store import Store

GROUPS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes written by one pass over a batch."""

    jobs: int
    group: int | None  # answers per transaction; None: as the worker groups them
    input_bytes: int
    bytes_per_job: int
    log_bytes: int  # largest size of the write-ahead log


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--answer-bytes", type=int, default=400)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where the store is created and removed")
    parser.add_argument("--model", help="a GGUF file: run it instead of made-up answers")
    options = parser.parse_args()
    found = []
    for group in GROUPS if options.model is None else (None,):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            source = _job_file(folder, options.jobs, options.line_bytes)
            if group is None:
                found.append(_run_model(folder, source, options))
            else:
                found.append(_commit_groups(folder, source, group, options))
    setup = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "sqlite": sqlite3.sqlite_version,
        "slots": options.slots,
        "answer_bytes": options.answer_bytes if options.model is None else None,
    }
    print(json.dumps({**setup, "measured": [asdict(each) for each in found]}, indent=2))
    return 0


def _job_file(folder: Path, jobs: int, line_bytes: int) -> Path:
    path = folder / "jobs.jsonl"
    with path.open("w") as file:
        for number in range(jobs):
            words = f"{number * 7919 % jobs} ".ljust(line_bytes, "x")  # not in the order of the file
            line = {"custom_id": f"job-{number}", "prompt": words, "max_tokens": 4}
            file.write(json.dumps(line) + "\n")
    return path


def _commit_groups(folder: Path, source: Path, group: int, options: argparse.Namespace) -> Measured:
    """Run a batch with answers in groups of `group`: refill their slots, then commit the answers."""
    body = json.dumps({"text": "y" * options.answer_bytes}).encode()
    largest = 0
    with Store(folder / "store") as store:
        batch = submit(store, source, Submission("model")).batch
        waiting = iter([item.id for item in store.waiting([batch.id], limit=options.jobs)])
        before = _io("wchar")
        running = _start(store, waiting, options.slots)
        while running:
            answered = running[:group]
            running = running[group:]
            running += _start(store, waiting, len(answered))
            store.commit([FinishedJob(job, body, 100, 50, 10, 1.0) for job in answered])
            store.batch(batch.id)
            log = folder / "store" / "store.db-wal"
            largest = max(largest, log.stat().st_size if log.exists() else 0)
        assert store.batch(batch.id).counts.done == options.jobs
    written = _io("wchar") - before
    return Measured(options.jobs, group, source.stat().st_size, written // options.jobs, largest)


def _start(store: Store, waiting: Iterator[int], count: int) -> list[int]:
    jobs = list(islice(waiting, count))
    return [job.id for job in store.start(jobs).running] if jobs else []


def _run_model(folder: Path, source: Path, options: argparse.Namespace) -> Measured:
    before = _io("write_bytes")
    words = ["run", source, "-o", folder / "out.jsonl", "--model", options.model, "--store", folder / "store"]
    words += ["--context", 1024, "--sequences", options.slots]
    code = cli.run([str(word) for word in words])
    if code:
        sys.exit(code)
    written = _io("write_bytes") - before
    return Measured(options.jobs, None, source.stat().st_size, written // options.jobs, 0)


def _io(name: str) -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
