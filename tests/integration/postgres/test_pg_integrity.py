"""Damaged answers on PostgreSQL are found, requeued and computed again; those from before checksums are accepted."""

import json
from pathlib import Path

import pytest

from support.jobs_store import answer, pending, submitted
from support.postgres import Cluster, asked
from support.run_cli import said
from tokenmill.jobs.models import Counts, JobId
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE answers SET body = '{}' WHERE id = 2",
        "UPDATE jobs SET answer = 3 WHERE answer = 2",
        "UPDATE jobs SET answer = NULL WHERE answer = 2",
    ],
)
def test_a_damaged_answer_is_requeued(postgres: Cluster, tmp_path: Path, damage: str) -> None:
    server = postgres.fresh()
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
        jobs = pending(store, batch)
        store.start(jobs)
        store.commit([answer(job, str(job)) for job in jobs])
        with Output(store, batch) as output:
            assert output.finish()
        good = Path(batch.output or "").read_bytes()
        asked(server, damage)
        assert said(tmp_path, "store", "check", "--store", server.url).returncode == 1
        with Output(store, batch) as output:
            assert not output.finish()
            assert store.batch(batch.id).counts == Counts(pending=1, done=2)
            (job,) = pending(store, batch)
            if not store.start([job]).answered:
                store.commit([answer(job, str(job))])
            assert output.finish()
        assert Path(batch.output or "").read_bytes() == good
    found = said(tmp_path, "store", "check", "--store", server.url, "--json")
    assert found.returncode == 0, found.stdout
    assert json.loads(found.stdout)["answers"] == 3


def test_answers_without_a_checksum_are_accepted(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        store.start(pending(store, batch))
        store.commit([answer(JobId.of(batch.id, 1))])
    asked(server, "UPDATE answers SET checksum = NULL")
    with StoreReader(server) as reader:
        report = reader.check()
        assert (report.clean, report.without_checksum) == (True, 1)
        assert reader.results(batch.id, 0, 10)[0].body is not None
