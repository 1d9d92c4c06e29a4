"""Runs a job file that is still being stored, on a fake engine.

    growing.py STORE FOLDER

As a program, it prints a line for each stored group and each change of the counts, and `finished` at the end, so that a
test can kill it at any of these moments. After each group except the first, it waits for a line on stdin, or its end.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from support.fake_engine import FakeEngine
from support.worked import LIMIT_S, QUICK
from tokenmill.jobs.ingest import background as ingesting
from tokenmill.jobs.ingest import submit as submitting
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.ingest.submit import FileSubmission, Hooks
from tokenmill.jobs.models import Submission
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.address import address_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask, work
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.storage import lines

GROUP_LINES, BLOCK_BYTES = 10, 1024


def small_groups(set_value: Callable[[object, str, object], None]) -> None:
    """Use groups of a few lines, without buffering ahead."""
    set_value(submitting, "GROUP_LINES", GROUP_LINES)
    set_value(lines, "BLOCK_BYTES", BLOCK_BYTES)
    set_value(ingesting, "FOREGROUND_S", 0.0)


def submission(store: Store, folder: Path, hooks: Hooks | None = None, *, strict: bool = False) -> FileSubmission:
    how = Submission("m", output=str(folder / "out.jsonl"), strict=strict)
    return FileSubmission(store, folder / "jobs.jsonl", how, 0, None, hooks or Hooks())


async def worked(
    store: Store,
    ingest: Ingest,
    engine: FakeEngine,
    *,
    stop: asyncio.Event | None = None,
    tell: Callable[[Snapshot], None] | None = None,
) -> RunReport:
    """Work the batch of an ingest to its end, for a few minutes at most."""
    shape = shape_of(engine.capabilities, engine.identity)
    batch = ingest.found.batch
    async with asyncio.timeout(LIMIT_S):
        return await work(
            WorkTask(
                store,
                [batch],
                engine,
                shape,
                outputs={} if ingest.output is None else {batch.id: ingest.output},
                options=replace(QUICK, count_minimum=False),
                stop=stop or asyncio.Event(),
                on_snapshot=tell or (lambda _: None),
                shards=store.shards(shape.width),
                ingest=ingest,
            )
        )


def main() -> None:
    small_groups(setattr)
    groups = count()

    def progress(line: int) -> None:
        _print(f"stored {line}")
        if next(groups):
            sys.stdin.readline()

    def tell(now: Snapshot) -> None:
        _print(f"done {now.counts.done}")

    async def run(store: Store, ingest: Ingest) -> None:
        await worked(store, ingest, FakeEngine(), tell=tell)

    with (
        Store(address_of(sys.argv[1])) as store,
        Ingest(submission(store, Path(sys.argv[2]), Hooks(progress))) as ingest,
    ):
        if not ingest.found.batch.finished:
            asyncio.run(run(store, ingest))
    _print("finished")


def _print(line: str) -> None:
    """One write, because two threads print."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    main()
