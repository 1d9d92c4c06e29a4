"""Which batches a runner of `tokenmill work` takes up while it is at work on others."""

import asyncio
import sys
from pathlib import Path

import pytest

from support.jobs_store import submitted
from tokenmill.cli.engine_for import Choice
from tokenmill.cli.work import _Runner
from tokenmill.config import EngineConfig
from tokenmill.jobs.job import Batch
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import Options


def test_a_batch_of_an_earlier_round_can_join_and_none_joins_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["tokenmill.cli.work"], "LOOK_S", 0.0)

    async def scenario(store: Store) -> list[str]:
        runner = _Runner(
            store, Choice("m", "m", EngineConfig(), tmp_path), None, Options(), tmp_path, stay=False, measure=False
        )
        before, at_work = (submitted(store, tmp_path / name, ["a"]) for name in ("before", "at work"))
        runner.seen = {each.id: each.name for each in (before, at_work)}
        joining = asyncio.Queue[Batch]()
        watch = asyncio.create_task(runner._watch(joining, {at_work.id}))
        async with asyncio.timeout(60):
            first = await joining.get()
            later = submitted(store, tmp_path / "later", ["a"])
            second = await joining.get()
        watch.cancel()
        assert (first.id, second.id) == (before.id, later.id)
        return [before.name, later.name]

    with Store(tmp_path / "store") as store:
        names = asyncio.run(scenario(store))
    assert capsys.readouterr().err.splitlines() == [f"{name} joins: 1 job" for name in names]
