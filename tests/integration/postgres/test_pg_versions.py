"""A store of an earlier version is brought up to date by who writes, and refused by who only looks."""

from pathlib import Path

import pytest

from support.postgres import Cluster, asked
from tokenmill.errors import StoreError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Submission
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.http_batches import HttpBatches, HttpBatchRequest, StoredFile
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

COLUMNS = (
    "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = current_schema() "
    "AND table_name IN ('runners', 'answers', 'files', 'http_batches', 'http_batch_states') ORDER BY 1, 2"
)


def without_http_batches(server: PostgresAddress) -> None:
    """Make a store of version 3 of one of version 4."""
    asked(server, "DROP VIEW http_batch_states")
    asked(server, "DROP TABLE files, http_batches")
    asked(server, "UPDATE tokenmill SET version = 3")


def test_a_store_of_the_first_version_is_brought_up_to_date(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    Store(server).close()
    wanted = asked(server, COLUMNS)
    without_http_batches(server)
    asked(server, "ALTER TABLE runners DROP COLUMN model_id, DROP COLUMN room, DROP COLUMN batches")
    asked(server, "ALTER TABLE answers DROP COLUMN checksum")
    asked(server, "UPDATE tokenmill SET version = 1")
    with pytest.raises(StoreError, match="version 1, ", check=lambda error: error.code == "store_too_old") as refused:
        StoreReader(server)
    assert "tokenmill run" in (refused.value.hint or "")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "one"}\n')
    with Store(server) as store:
        assert submit(store, jobs, Submission("model")).batch.counts.total == 1
    assert asked(server, COLUMNS) == wanted
    assert asked(server, "SELECT version FROM tokenmill") == [(4,)]
    StoreReader(server).close()


def test_a_store_of_version_3_gets_http_batches(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "one"}\n')
    with Store(server) as store:
        name = submit(store, jobs, Submission("model")).batch.name
    without_http_batches(server)
    rows = HttpBatches(server)
    rows.add_file(StoredFile("file-1", None, "f", "batch", 1, "", 0.0))
    batch = rows.create(HttpBatchRequest("/v1/completions", "24h", 86400.0, "file-1"), None)
    assert batch is not None
    assert rows.unfinished() == [batch]
    rows.close()
    with StoreReader(server) as reader:
        assert reader.named(name).counts.total == 1


def test_a_store_of_a_newer_version_is_refused(postgres: Cluster) -> None:
    server = postgres.fresh()
    Store(server).close()
    asked(server, "UPDATE tokenmill SET version = 99")
    for opening in (Store, StoreReader, HttpBatches):
        with pytest.raises(StoreError, match="99", check=lambda error: error.code == "store_too_new"):
            opening(server)
