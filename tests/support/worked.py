"""Runs a batch of a few prompts through an engine, for tests."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support.jobs_store import submitted
from tokenmill.engine.engine import Engine
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work
from tokenmill.jobs.worker.progress import RunReport, Snapshot

QUICK = WorkOptions(first_delay_s=0.01, tick_s=0.05, job_timeout_s=200.0, count_minimum=True)
LIMIT_S = 200.0


async def worked(
    store: Store,
    batch: Batch,
    engine: Engine,
    *,
    options: WorkOptions = QUICK,
    stop: asyncio.Event | None = None,
    tell: Callable[[Snapshot], None] | None = None,
) -> RunReport:
    """Work a batch with its output, for a few minutes at most; the engine is not closed."""
    shape = shape_of(engine.capabilities, engine.identity)
    with Output(store, batch) as output:
        async with asyncio.timeout(LIMIT_S):
            return await work(
                WorkTask(
                    store,
                    [batch],
                    engine,
                    shape,
                    outputs={batch.id: output},
                    options=options,
                    stop=stop or asyncio.Event(),
                    on_snapshot=tell or (lambda _: None),
                )
            )


def run_prompts(
    folder: Path, prompts: Iterable[str], engine: Callable[[], Engine], **more: Any
) -> tuple[RunReport, dict[str, dict[str, Any]]]:
    """A whole run: its report and the output lines by prompt."""

    async def run() -> RunReport:
        started = engine()
        try:
            return await worked(store, batch, started, **more)
        finally:
            await started.close()

    with Store(folder / "store") as store:
        batch = submitted(store, folder / "jobs.jsonl", prompts)
        report = asyncio.run(run())
    return report, lines(folder / "jobs.out")


def lines(path: Path) -> dict[str, dict[str, Any]]:
    """Output lines by the prompt in their custom_id; each must be there once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_prompt = {line["custom_id"].partition("-")[2]: line for line in found}
    assert len({line["custom_id"] for line in found}) == len(found)
    return by_prompt
