"""The same new command on two hosts in one moment: one batch, stored by one of them, worked on by both."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from support.jobs_store import write_jobs
from support.postgres import asked
from tokenmill.jobs.ingest.submit import Submitted, submit
from tokenmill.jobs.models import Counts, JobId, Submission
from tokenmill.jobs.sharding.coordination import BeingStored
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.postgres_errors import Taken
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")
LIMIT_S = 120.0
HOW = Submission("m", output="/out")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tokenmill.jobs.ingest.submit.FIRST_GROUP_LINES", 10)
    monkeypatch.setattr("tokenmill.jobs.ingest.submit.GROUP_LINES", 10)
    monkeypatch.setattr("tokenmill.jobs.ingest.submit._POLL_S", 0.01)
    monkeypatch.setattr("tokenmill.storage.lines.BLOCK_BYTES", 256)
    return write_jobs(tmp_path / "j", [f"prompt {number}" for number in range(60)])


@contextmanager
def beside(work: Callable[[], Submitted]) -> Iterator["Future[Submitted]"]:
    """On another host at the same time."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(work)


def test_both_find_nothing_and_one_begins(server: PostgresAddress, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    first = threading.local()

    def wait(_how: Submission) -> None:
        if not hasattr(first, "waited"):
            first.waited = True
            both.wait(LIMIT_S)  # neither has found it by now

    monkeypatch.setattr(sys.modules["tokenmill.jobs.ingest.submit"], "check_unused", wait)

    with (
        Store(server) as one,
        Store(server) as two,
        beside(lambda: submit(two, path, HOW, processes=0)) as other,
    ):
        here, there = submit(one, path, HOW, processes=0), other.result(LIMIT_S)
        assert here.batch.id == there.batch.id
        assert sorted((here.continued, there.continued)) == [False, True]
        assert (here.batch.counts, there.batch.counts) == (Counts(pending=60), Counts(pending=60))
        assert len(one.batches()) == 1


def test_one_that_comes_in_between_waits_for_the_other(server: PostgresAddress, path: Path) -> None:
    waiting, said = threading.Event(), list[str]()

    def tell(words: str) -> None:
        said.append(words)
        waiting.set()

    with (
        Store(server) as one,
        Store(server) as two,
        ThreadPoolExecutor(1) as thread,
    ):
        others = list[Future[Submitted]]()

        def progress(_: int) -> None:
            if not others:
                others.append(thread.submit(lambda: submit(two, path, HOW, processes=0, on_wait=tell)))
                assert waiting.wait(LIMIT_S)

        here = submit(one, path, HOW, processes=0, progress=progress)
        there = others[0].result(LIMIT_S)
    assert (here.batch.id, there.continued) == (there.batch.id, True)
    assert there.batch.counts == Counts(pending=60)
    assert [f"process {os.getpid()} on " in words for words in said] == [True]


def test_when_the_other_is_lost_the_rest_is_stored_in_its_place(
    server: PostgresAddress, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.jobs.sharding.worker_lease.RENEW_S", 0.0)  # whoever waits looks around each time
    said = list[str]()

    def lose(words: str) -> None:
        said.append(words)
        asked(
            server,
            "UPDATE runners SET kernel = 'elsewhere', lease_until = clock_timestamp() - interval '1 second' "
            "WHERE id = ?",
            one._coordinator.id,
        )

    def progress(_: int) -> None:
        raise KeyboardInterrupt

    with Store(server) as one, Store(server) as two:
        with pytest.raises(KeyboardInterrupt):
            submit(one, path, HOW, processes=0, progress=progress)
        there = submit(two, path, HOW, processes=0, on_wait=lose)
        assert (len(said), there.continued, there.batch.counts) == (1, True, Counts(pending=60))
        with pytest.raises(BeingStored):  # it is another's now
            one.submissions.add(there.batch.id, [(0,) * 10 + (JobId.of(there.batch.id, 61),)], [])


def test_a_pipe_with_the_same_jobs_waits_for_the_file(server: PostgresAddress, path: Path) -> None:
    waiting = threading.Event()
    out, into = os.pipe()
    with os.fdopen(into, "wb") as pipe:
        pipe.write(path.read_bytes())
    with (
        os.fdopen(out) as stdin,
        patch.object(sys, "stdin", stdin),
        Store(server) as one,
        Store(server) as two,
        ThreadPoolExecutor(1) as thread,
    ):
        others = list[Future[Submitted]]()

        def progress(_: int) -> None:
            if not others:
                tell: Callable[[str], None] = lambda _: waiting.set()  # noqa: E731
                others.append(thread.submit(lambda: submit(two, "-", HOW, processes=0, on_wait=tell)))
                assert waiting.wait(LIMIT_S)

        here = submit(one, path, HOW, processes=0, progress=progress)
        there = others[0].result(LIMIT_S)
        assert (there.batch.id, there.continued) == (here.batch.id, True)
        assert there.batch.counts == Counts(pending=60)
        assert [batch.id for batch in one.batches()] == [here.batch.id]


def test_what_the_server_says_of_its_index_is_not_shown(server: PostgresAddress) -> None:
    with Store(server) as one, Store(server) as two:
        one.submissions.seal(one.submissions.begin(HOW, source="x", key=None), b"key")
        with pytest.raises(Taken) as said:
            two.submissions.seal(two.submissions.begin(HOW, source="x", key=None), b"key")
        assert "constraint" not in said.value.message
