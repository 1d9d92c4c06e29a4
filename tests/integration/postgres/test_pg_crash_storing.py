"""A server that crashes while the lines of a file are stored: none is missing afterwards, and nothing is said to be
there that is not."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from support.jobs_store import write_jobs
from support.postgres import Cluster, asked, cluster, database_of
from tokenmill.jobs.ingest import submit as module
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Counts, JobId, Submission
from tokenmill.jobs.sharding.coordination import LinesLost
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")
LINES, GROUP = 400, 50
HOW = Submission("m", output="/nowhere/out")


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with cluster(safe=True) as started:
        yield started


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """More groups than one, with blank lines between the others."""
    monkeypatch.setattr(module, "FIRST_GROUP_LINES", GROUP)
    monkeypatch.setattr(module, "GROUP_LINES", GROUP)
    monkeypatch.setattr("tokenmill.storage.lines.BLOCK_BYTES", 1024)
    file = write_jobs(tmp_path / "j", [f"prompt {number}" for number in range(LINES)])
    file.write_text(file.read_text().replace("\n", "\n\n"))
    return file


def crashing(own: Cluster, at: set[int]) -> Callable[[int], None]:
    """The power of the server fails when this many groups were acknowledged."""
    groups = iter(range(1, LINES))

    def progress(_: int) -> None:
        if next(groups) in at:
            own.stop(signal.SIGQUIT)
            own.start()

    return progress


def all_there(server: PostgresAddress, batch: Batch) -> None:
    assert batch.sealed_s is not None
    assert (batch.counts, batch.lines) == (Counts(pending=LINES), 2 * LINES - 1)
    found = asked(server, "SELECT id & 4294967295, custom_id FROM jobs WHERE batch = ? ORDER BY id", batch.id)
    assert found == [(2 * number - 1, f"{number}-prompt {number - 1}") for number in range(1, LINES + 1)]
    with Store(server) as store:
        first, last = (store.job(JobId.of(batch.id, line)) for line in (1, 2 * LINES - 1))
        assert first is not None
        assert last is not None
        assert ("prompt 0" in first.line, f"prompt {LINES - 1}" in last.line) == (True, True)


def forgetful(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that acknowledges what is not on its disk, whatever is asked of it: fsync is off, or a standby took
    over."""
    database = database_of(store)
    writing = database.writing
    monkeypatch.setattr(database, "writing", lambda *, durable: writing(durable=False))


@contextmanager
def piped(path: Path) -> Iterator[None]:
    """A file on stdin, as a pipe; it is small enough to lie in one."""
    out, into = os.pipe()
    with os.fdopen(into, "wb") as pipe:
        pipe.write(path.read_bytes())
    with os.fdopen(out) as stdin, patch.object(sys, "stdin", stdin):
        yield


def test_no_line_is_lost_with_the_server(own: Cluster, path: Path) -> None:
    server = own.fresh()
    with Store(server) as store:
        done = submit(store, path, HOW, processes=0, progress=crashing(own, {1, 3, 5}))
    assert not done.continued
    all_there(server, done.batch)


@pytest.mark.parametrize("at", [{1}, {3}, {8}])
def test_what_a_server_forgot_is_stored_again(
    own: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch, at: set[int]
) -> None:
    server = own.fresh()
    with Store(server) as store:
        forgetful(store, monkeypatch)
        done = submit(store, path, HOW, processes=0, progress=crashing(own, at))
        assert len(store.batches()) == 1
    all_there(server, done.batch)


def test_of_a_pipe_it_is_said_and_the_same_again_mends_it(
    own: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own.fresh()

    with Store(server) as store:
        forgetful(store, monkeypatch)
        with piped(path), pytest.raises(LinesLost) as said:
            submit(store, "-", HOW, processes=0, progress=crashing(own, {4}))
        assert "the same command" in str(said.value.hint)
    with Store(server) as store, piped(path):
        done = submit(store, "-", HOW, processes=0)
        assert [batch.id for batch in store.batches()] == [done.batch.id]
    all_there(server, done.batch)


def test_a_batch_is_not_sealed_without_its_lines(own: Cluster, path: Path) -> None:
    server = own.fresh()
    with Store(server) as store:
        batch = store.submissions.begin(HOW, source="x", key=b"k")
        with pytest.raises(LinesLost, match="lines 1 to 799 "):
            store.submissions.seal(batch, b"k", last=799, jobs=400)
        assert store.batch(batch).sealed_s is None
        assert store.submissions.seal(batch, b"k", last=0, jobs=0).sealed_s is not None
