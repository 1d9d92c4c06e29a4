"""A store of an earlier version is brought up to date by who writes, and refused by who only looks."""

from pathlib import Path

import pytest

from support.postgres import Cluster, asked
from tokenmill.errors import StoreError
from tokenmill.jobs.models import Submission
from tokenmill.jobs.reader import Reader
from tokenmill.jobs.store import Store
from tokenmill.jobs.submit import submit

COLUMNS = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name IN ('runners', 'answers') ORDER BY 1"


def test_a_store_of_the_first_version_is_brought_up_to_date(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    Store(server).close()
    wanted = asked(server, COLUMNS)
    asked(server, "ALTER TABLE runners DROP COLUMN model_id, DROP COLUMN room, DROP COLUMN batches")
    asked(server, "ALTER TABLE answers DROP COLUMN checksum")
    asked(server, "UPDATE tokenmill SET version = 1")
    with pytest.raises(StoreError, match="older version, 1") as refused:
        Reader(server)
    assert "tokenmill run or work" in (refused.value.hint or "")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "one"}\n')
    with Store(server) as store:
        assert submit(store, jobs, Submission("model")).batch.counts.total == 1
    assert asked(server, COLUMNS) == wanted
    assert asked(server, "SELECT version FROM tokenmill") == [(3,)]
    Reader(server).close()
