"""The content of files is stored and deleted with its row."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.errors import StoreError
from tokenmill.gateway.batches.files import FOLDER, FileStore
from tokenmill.jobs.store.http_batches import HttpBatches, HttpBatchRequest, StoredFile, new_file_id


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[HttpBatches]:
    opened = HttpBatches(tmp_path)
    yield opened
    opened.close()


def kept(files: FileStore, *, expires_s: float | None = None) -> StoredFile:
    file = new_file_id()
    files.draft(file).write_bytes(b"x")
    return files.keep(StoredFile(file, None, "x.jsonl", "batch", 1, "sum", 5.0, expires_s))


def test_a_file_is_there_when_its_row_is(tmp_path: Path, rows: HttpBatches) -> None:
    files = FileStore(tmp_path, rows)
    file = new_file_id()
    files.draft(file).write_bytes(b"x")
    assert rows.file(file) is None
    made = files.keep(StoredFile(file, None, "x.jsonl", "batch", 1, "sum", 5.0))
    assert not files.draft(file).exists()
    assert FileStore(tmp_path, rows).keep(made) == made  # a kill may have come before it was noted elsewhere
    assert rows.file(file) == made
    assert files.path(file).read_bytes() == b"x"


def test_a_file_that_a_batch_needs_stays(tmp_path: Path, rows: HttpBatches) -> None:
    files = FileStore(tmp_path, rows)
    file = kept(files)
    batch = rows.create(HttpBatchRequest("/v1/completions", "24h", 86400.0, file.id), None)
    assert batch is not None
    assert files.delete(file.id) == batch.id
    assert files.path(file.id).exists()
    assert rows.end(batch.id, "failed", even_cancelling=False)
    assert files.delete(file.id) is None
    assert not files.path(file.id).exists()


def test_expired_files_go(tmp_path: Path, rows: HttpBatches) -> None:
    files = FileStore(tmp_path, rows)
    short, needed, stays = kept(files, expires_s=6.0), kept(files, expires_s=6.0), kept(files)
    rows.create(HttpBatchRequest("/v1/completions", "24h", 86400.0, needed.id), None)
    assert files.sweep() == 1
    assert not files.path(short.id).exists()
    assert files.path(needed.id).exists()
    assert files.path(stays.id).exists()


def test_bytes_that_never_became_a_file_go_when_they_are_old(tmp_path: Path, rows: HttpBatches) -> None:
    files = FileStore(tmp_path, rows)
    new, old, whole = files.draft("new"), files.draft("old"), files.path("whole")
    for path in (new, old, whole):
        path.write_bytes(b"half")
    file = kept(files)
    long_ago = time.time() - 7200
    for path in (old, whole, files.path(file.id)):
        os.utime(path, (long_ago, long_ago))
    assert files.sweep() == 2
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {new.name, file.id}


def test_a_folder_that_cannot_be_made(tmp_path: Path, rows: HttpBatches) -> None:
    (tmp_path / "batches").write_text("a file")
    with pytest.raises(StoreError, match="batches"):
        FileStore(tmp_path / "batches", rows)
    with pytest.raises(StoreError, match="batches"):
        HttpBatches(tmp_path / "batches")
