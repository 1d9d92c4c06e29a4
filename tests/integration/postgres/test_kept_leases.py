"""A lease is kept by a thread, from the opening of a store to its end, whatever else its process does."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from support.postgres import asked
from tokenmill.engine.process.identity import Pid
from tokenmill.errors import StoreInUse
from tokenmill.jobs.models import Submission
from tokenmill.jobs.sharding import worker_lease
from tokenmill.jobs.sharding.worker_lease import Leased
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.postgres import Postgres
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

LIMIT_S = 120
EXPIRE = "UPDATE runners SET kernel = 'elsewhere', lease_until = clock_timestamp() - interval '1 second'"


class Rounds:
    """Counts how often the thread has looked after a lease."""

    def __init__(self) -> None:
        self._done = threading.Semaphore(0)

    def end(self) -> None:
        self._done.release()

    def another(self) -> None:
        """Wait for one that began after this."""
        while self._done.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may be under way
            assert self._done.acquire(timeout=LIMIT_S)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    found, tend = Rounds(), Leased.renew_lease

    def counted(self: Leased, *, patient: bool = True) -> None:
        try:
            tend(self, patient=patient)
        finally:
            found.end()

    monkeypatch.setattr(Leased, "renew_lease", counted)
    monkeypatch.setattr(worker_lease, "RENEW_S", 0.02)
    yield found
    for thread in keepers():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lease"]


def test_a_process_that_only_reads_or_loads_keeps_its_lease(server: PostgresAddress, rounds: Rounds) -> None:
    with Store(server) as reading:
        reading.submissions.begin(Submission("m"), source="stdin", key=None)
        asked(server, EXPIRE)
        rounds.another()
        with StoreReader(server) as reader:
            assert [runner.alive for runner in reader.runners()] == [True]
        with Store(server) as other:
            assert len(other.batches()) == 1  # half a batch of one that lives


def test_one_that_was_taken_for_lost_takes_its_place_again(server: PostgresAddress, rounds: Rounds) -> None:
    with Store(server) as store:
        asked(server, "DELETE FROM runners")
        rounds.another()
        with StoreReader(server) as reader:
            assert [runner.id for runner in reader.runners()] == [store._coordinator.id]


def test_a_connection_that_broke_while_nothing_was_asked_is_made_anew(server: PostgresAddress, rounds: Rounds) -> None:
    with Store(server) as store:
        assert isinstance(store._database, Postgres)
        asked(server, "SELECT pg_terminate_backend(?, 60000)", store._database._connection.info.backend_pid)
        asked(server, "DELETE FROM runners")
        rounds.another()
        with StoreReader(server) as reader:
            assert [runner.id for runner in reader.runners()] == [store._coordinator.id]


def test_who_left_does_not_stand_up_again(server: PostgresAddress, rounds: Rounds) -> None:
    with Store(server) as store:
        rounds.another()
        assert isinstance(store._coordinator, Leased)
        store._coordinator.leave()
        store._coordinator._renew()  # as the thread may, that was about to
        assert asked(server, "SELECT id FROM runners") == []


def test_it_does_not_keep_a_process_from_its_end(server: PostgresAddress) -> None:
    text = (
        "import sys; from tokenmill.jobs.store.address import address_of; from tokenmill.jobs.store.store import Store\n"
        "store = Store(address_of(sys.argv[1])); sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", text, server.url], check=False, timeout=LIMIT_S)
    assert done.returncode == 7


@pytest.mark.usefixtures("unkept")
def test_an_output_that_another_took_meanwhile_stays_its_own(
    server: PostgresAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds that out, and however often the connection is made anew."""
    monkeypatch.setattr(worker_lease, "RENEW_S", 0.0)
    with Store(server) as one, Store(server) as other:
        assert isinstance(one._database, Postgres)
        assert isinstance(one._coordinator, Leased)
        assert one.claim_output(1)
        asked(server, "SELECT pg_terminate_backend(?, 60000)", one._database._connection.info.backend_pid)
        assert other.claim_output(1)
        with pytest.raises(StoreInUse, check=lambda error: error.code == "output_claimed"):
            one._coordinator.renew_lease(patient=False)
        other.close()
        with pytest.raises(StoreInUse, check=lambda error: error.code == "output_claimed"):
            one.batches()


@pytest.mark.parametrize(("raised", "gone"), [(ProcessLookupError, True), (PermissionError, False), (None, False)])
def test_a_process_that_cannot_be_looked_at_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, raised: type[OSError] | None, *, gone: bool
) -> None:
    def kill(_pid: int, _signal: int) -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr(Pid, "here", staticmethod(lambda _: None))
    monkeypatch.setattr(os, "kill", kill)
    assert worker_lease._has_ended(1, 5) is gone


def test_a_process_that_can() -> None:
    own = Pid.here(os.getpid())
    assert own is not None
    assert not worker_lease._has_ended(own.pid, own.ticks)
    assert worker_lease._has_ended(own.pid, own.ticks + 1)  # another process has its number now
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    zombie = Pid.here(ended.pid)
    assert zombie is not None
    assert worker_lease._has_ended(ended.pid, zombie.ticks)  # its parent has not asked yet
    ended.wait(LIMIT_S)
    assert worker_lease._has_ended(ended.pid, zombie.ticks)
