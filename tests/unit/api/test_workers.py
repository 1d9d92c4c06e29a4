"""Batches that join a running worker."""

import asyncio
import logging
from pathlib import Path

import pytest

from support.jobs_store import submitted
from tokenmill.api import workers
from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.options import EngineOptions
from tokenmill.api.stopping import Stop
from tokenmill.api.summary import WorkSummary
from tokenmill.api.workers import BatchWorker
from tokenmill.config import Config, EngineConfig
from tokenmill.jobs.models import Batch
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions


def test_a_batch_of_an_earlier_round_can_join_and_none_joins_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "POLL_S", 0.0)
    caplog.set_level(logging.INFO, "tokenmill")

    async def scenario(store: Store) -> list[str]:
        choice = EngineChoice("m", "m", EngineConfig(), tmp_path)
        setup = EngineSetup(choice, EngineOptions(), Config())
        runner = BatchWorker(store, setup, WorkOptions(), tmp_path, Stop(), stay=False)
        before, running = (submitted(store, tmp_path / name, ["a"]) for name in ("before", "running"))
        runner.names = {each.id: each.name for each in (before, running)}
        joining = asyncio.Queue[Batch]()
        watch = asyncio.create_task(runner.watch(joining, {running.id}))
        async with asyncio.timeout(60):
            first = await joining.get()
            later = submitted(store, tmp_path / "later", ["a"])
            second = await joining.get()
        watch.cancel()
        assert (first.id, second.id) == (before.id, later.id)
        return [before.name, later.name]

    with Store(tmp_path / "store") as store:
        names = asyncio.run(scenario(store))
    assert caplog.messages == [f"{name} joins: 1 job" for name in names]


def test_a_summary_of_work_is_one_short_line() -> None:
    assert repr(WorkSummary((), (), 1.0)) == "<WorkSummary 0 batches: 0 answers computed, 0 tokens generated in 1.0 s>"
