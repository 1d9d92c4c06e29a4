"""Files and batches that were submitted by HTTP, in a folder and on a server."""

import fcntl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.jobs_store import Clock, answer, pending, submitted
from support.postgres import asked
from tokenmill.errors import StoreInUse
from tokenmill.jobs.models import BatchTotals
from tokenmill.jobs.store import http_batches
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.http_batches import (
    STATUSES,
    HttpBatch,
    HttpBatches,
    HttpBatchRequest,
    Outcome,
    Page,
    RefusedLine,
    StoredFile,
    batches_by_status,
    new_file_id,
)
from tokenmill.jobs.store.sqlite import WAIT
from tokenmill.jobs.store.store import Store

ALL = Page(100)


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    made.now_s = 1000.0
    return made


@pytest.fixture
def rows(address: Address, clock: Clock) -> Iterator[HttpBatches]:
    opened = HttpBatches(address, clock=clock)
    yield opened
    opened.close()


def added(
    rows: HttpBatches, name: str = "a", *, owner: str | None = None, expires_s: float | None = None
) -> StoredFile:
    file = StoredFile(new_file_id(), owner, name, "batch", len(name), "", rows.now_s(), expires_s)
    rows.add_file(file)
    return file


def request(file: StoredFile, **more: object) -> HttpBatchRequest:
    return replace(HttpBatchRequest("/v1/completions", "24h", 86400.0, file.id), **more)  # type: ignore[arg-type]


def created(rows: HttpBatches, file: StoredFile, owner: str | None = None, **more: object) -> HttpBatch:
    batch = rows.create(request(file, **more), owner)
    assert batch is not None
    return batch


def test_a_file_is_kept(rows: HttpBatches, address: Address) -> None:
    file = added(rows, "é\0.jsonl")
    rows.add_file(replace(file, filename="other"))  # a kill may have come before it was known
    again = HttpBatches(address)
    assert again.file(file.id) == file
    assert again.file("file-none") is None
    again.close()


def test_pages_of_a_list(rows: HttpBatches) -> None:
    files = [added(rows, f"f{number}", owner="eva" if number % 2 else None) for number in range(5)]
    seen: list[str] = []
    page = Page(2)
    while found := rows.files(None, page):
        seen += [file.filename for file in found[:2]]
        page = Page(2, found[: page.limit][-1].id)
        assert len(found) <= 3
    assert seen == ["f4", "f3", "f2", "f1", "f0"]
    assert [f.filename for f in rows.files(None, Page(9, files[2].id, newest_first=False)) or ()] == ["f3", "f4"]
    assert [f.filename for f in rows.files(None, Page(1, newest_first=False)) or ()] == ["f0", "f1"]
    assert [f.filename for f in rows.files("adam", ALL) or ()] == ["f4", "f2", "f0"]
    assert [f.filename for f in rows.files("eva", ALL, purpose="batch") or ()] == ["f4", "f3", "f2", "f1", "f0"]
    assert rows.files(None, ALL, purpose="batch_output") == []
    assert rows.files(None, Page(2, "file-nowhere")) is None


def test_a_file_that_a_batch_needs_stays(rows: HttpBatches) -> None:
    file = added(rows)
    batch = created(rows, file)
    assert rows.delete_file(file.id) == batch.id
    assert rows.file(file.id) == file
    assert rows.end(batch.id, "failed", even_cancelling=False)
    assert rows.delete_file(file.id) is None
    assert rows.file(file.id) is None
    assert rows.create(request(file), None) is None


def test_files_expire(rows: HttpBatches, clock: Clock) -> None:
    short, stays = added(rows, expires_s=2000.0), added(rows)
    assert rows.expired_files() == []
    clock.now_s = 2000.0
    assert rows.file(short.id) is None
    assert rows.has_file(short.id)
    assert [file.id for file in rows.files(None, ALL) or ()] == [stays.id]
    assert rows.expired_files() == [short.id]


def test_the_life_of_a_batch(rows: HttpBatches, address: Address, clock: Clock, tmp_path: Path) -> None:
    batch = created(rows, added(rows), "eva", metadata={"a": "b"}, priority=3, output_kept_s=3600)
    assert (batch.status, batch.owner, batch.metadata, batch.priority) == ("validating", "eva", {"a": "b"}, 3)
    assert (batch.created_s, batch.expires_s, batch.outcome) == (1000.0, 87400.0, None)
    assert rows.unfinished() == [batch]
    rows.set_model(batch.id, "small")
    clock.now_s = 1001.0
    with Store(address, clock=clock) as store:
        jobs = submitted(store, tmp_path / "jobs", ["one", "two"], {"name": batch.id})
        running = rows.batch(batch.id)
        assert running is not None
        assert (running.status, running.in_progress_s, running.model) == ("in_progress", 1001.0, "small")
        assert running.outcome == Outcome(0, 0, 2, BatchTotals())
        first, second = pending(store, jobs)
        store.start([first])
        store.commit([answer(first)])
        store.cancel(jobs.id)
        clock.now_s = 1002.0
        assert rows.finalize(batch.id)
        assert not rows.finalize(batch.id)
        assert not rows.cancel(batch.id)  # too late
        done = store.batch(jobs.id)
        outcome = Outcome.of(done.counts, done.totals)
        assert outcome == Outcome(1, 1, 2, BatchTotals(1, 0, 10, 4, 2, 0.5))
        clock.now_s = 1003.0
        assert rows.end(batch.id, "completed", even_cancelling=True, outcome=outcome)
        assert not rows.end(batch.id, "expired", even_cancelling=True)
        store.retry(jobs.id, cancelled=True)  # the result files do not change any more, and nor does their batch
        store.submissions.forget(jobs.id)
    ended = rows.batch(batch.id)
    assert ended is not None
    assert (ended.status, ended.outcome) == ("completed", outcome)
    assert (ended.in_progress_s, ended.finalizing_s, ended.ended_s) == (1001.0, 1002.0, 1003.0)
    assert rows.unfinished() == []
    assert second


def test_a_batch_that_is_cancelled(rows: HttpBatches, clock: Clock) -> None:
    batch = created(rows, added(rows), "eva")
    clock.now_s = 1001.0
    assert rows.cancel(batch.id)
    assert not rows.cancel(batch.id)
    assert not rows.finalize(batch.id)
    assert not rows.end(batch.id, "failed", even_cancelling=False)
    bad = (RefusedLine("c", "m", 7, "p"),)
    assert rows.end(batch.id, "cancelled", even_cancelling=True, errors=bad)
    found = rows.batch(batch.id)
    assert found is not None
    assert (found.status, found.errors, found.cancelling_s, found.ended_s) == ("cancelled", bad, 1001.0, 1001.0)
    assert rows.batches("adam", ALL) == []
    assert rows.batches("eva", ALL) == [found]


def test_batches_by_their_metadata(rows: HttpBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_batches, "_SCANNED", 2)
    file = added(rows)
    held: list[dict[str, str] | None] = [{"key": "1", "x": "y"}, {"key": "2"}, None, {"key": "1"}, {"1": "key\0\ud800"}]
    made = [created(rows, file, "eva", metadata=one).id for one in held]

    def found(page: Page = ALL, owner: str = "eva", **wanted: str) -> list[int]:
        return [made.index(batch.id) for batch in rows.batches(owner, page, metadata=wanted) or ()]

    assert found() == [4, 3, 2, 1, 0]
    assert found(Page(2)) == [4, 3, 2]
    assert found(key="1") == [3, 0]
    assert found(key="1", x="y") == [0]
    assert found(key="1' OR '1'='1") == []
    assert found(Page(1), key="1") == [3, 0]  # one more, where there is one
    assert found(Page(1, made[3]), key="1") == [0]
    assert found(owner="adam", key="1") == []
    assert rows.batches("eva", Page(1, "batch_none")) is None


def test_batches_are_counted_by_status(rows: HttpBatches, address: Address, tmp_path: Path) -> None:
    file = added(rows)
    names = [created(rows, file).id for _ in range(4)]
    rows.cancel(names[0])
    rows.end(names[1], "failed", even_cancelling=False)
    with Store(address) as store:
        submitted(store, tmp_path / "jobs", ["one"], {"name": names[2]})
    counted = dict.fromkeys(STATUSES, 0) | dict.fromkeys(("cancelling", "failed", "in_progress", "validating"), 1)
    assert batches_by_status(address) == counted


def test_where_there_is_no_store(tmp_path: Path) -> None:
    assert batches_by_status(tmp_path) == dict.fromkeys(STATUSES, 0)
    (tmp_path / "store.db").write_bytes(b"no database" * 100)
    assert batches_by_status(tmp_path) is None


def test_they_are_written_while_another_process_works(address: Address, rows: HttpBatches) -> None:
    with Store(address):
        assert rows.batch(created(rows, added(rows)).id)


def test_a_store_of_an_older_version_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_batches, "_UPGRADE_WAIT_S", 0.2)
    with Store(tmp_path):
        asked(tmp_path, "PRAGMA user_version = 2")
        with pytest.raises(StoreInUse):
            HttpBatches(tmp_path)


def test_a_process_that_waits_to_write_gets_its_turn(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        jobs = pending(store, submitted(store, tmp_path / "jobs", ["one", "two", "three"]))
        rows = HttpBatches(tmp_path / "s")
        deferred = []

        def start(job: int) -> None:
            store.start([job])
            deferred.append(store.unflushed)

        start(jobs[0])
        writing = threading.Thread(target=added, args=(rows,))
        writing.start()
        with (tmp_path / "s" / WAIT).open() as wait:
            while not _is_locked(wait.fileno()):
                time.sleep(0.001)
        start(jobs[1])
        writing.join()
        start(jobs[2])
        assert deferred == [True, False, True]
        rows.close()


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
