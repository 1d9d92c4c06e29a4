"""A server that is away, or that ends connections: waited for once, and what was under way is done again, once."""

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.jobs_store import pending, submitted, write_jobs
from support.postgres import cluster, cut, database_of
from support.run_cli import until
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, Submission
from tokenmill.jobs.store import postgres as module
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.backend import Shutdown
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.postgres_errors import ConnectionLost, ServerUnreachable
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")


def test_a_host_that_sleeps_in_its_turn_is_not_waited_for(
    server: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 1)
    with Store(server) as asleep, Store(server) as other:
        batch = submitted(other, tmp_path / "j", ["a", "b"])
        view = other.shards(1)
        taken = list[int]()

        def sleep_in_turn() -> None:
            with database_of(asleep).writing(durable=False):
                database_of(asleep).run("lock", key=-1)
                # Returns when the server has ended this one.
                taken.append(len(view.window([batch.id], again=True, limit=5)))

        with pytest.raises(ConnectionLost, match="idle-in-transaction"):
            sleep_in_turn()
        assert len(taken) == 1
        assert taken[0] > 0
        assert len(asleep.batches()) == 1
        assert {runner.id for runner in asleep.runners()} == {asleep._coordinator.id, other._coordinator.id}


def test_the_server_is_told_when_to_let_go(server: PostgresAddress) -> None:
    with Store(server) as store, StoreReader(server) as reader:
        for one in (store, reader):
            found = database_of(one)._connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
            assert found == ("20s",)


class Clock(Shutdown):
    """Time that only goes on where somebody waits for the server."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return False


def test_a_server_that_stays_away_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries, connected = Clock(), list[float](), module._connected
    monkeypatch.setattr(module, "time", clock)
    with cluster() as own:
        store = Store(own.fresh(), shutdown=clock)
        batch = submitted(store, tmp_path / "j", ["a"])
        view = store.shards(1)
        clock.now_s += 500  # for so long nobody asked: that is not the server's fault
        own.stop(signal.SIGQUIT)

        def counted(*args: object) -> object:
            tries.append(clock.now_s)
            return connected(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "_connected", counted)
        with pytest.raises(ConnectionLost, check=lambda error: type(error) is ConnectionLost):
            store.batch(batch.id)
        waited = len(tries)
        assert 1540 < clock.now_s <= 1560
        ends: list[Callable[[], object]] = [lambda: store.start([1]), view.close, lambda: store.batch(batch.id)]
        for end in ends:
            with pytest.raises(ConnectionLost, check=lambda error: type(error) is ConnectionLost):
                end()
        store.close()
        assert len(tries) == waited
        assert clock.now_s <= 1560


def test_one_that_comes_back_is_found_again_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with cluster() as own, Store(own.fresh(), shutdown=clock) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        own.stop()
        with pytest.raises(ConnectionLost, check=lambda error: type(error) is ConnectionLost):
            store.batch(batch.id)
        own.start()
        clock.now_s += 10
        assert store.batch(batch.id).counts == Counts(pending=1)
        own.stop()
        before_s = clock.now_s
        with pytest.raises(ConnectionLost, check=lambda error: type(error) is ConnectionLost):
            store.batch(batch.id)
        assert clock.now_s > before_s + 40  # it is another time


def test_a_server_that_is_starting_up_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tokenmill"), "propagate", True)  # the command line turns it off
    with cluster() as own:
        server = own.fresh()
        with Store(server) as store:
            submitted(store, tmp_path / "j", ["a"])
        with own.starting_up() as promote, ThreadPoolExecutor() as threads:
            looking = threads.submit(has_batches, server)
            opening = threads.submit(Store, server)
            until(lambda: len({each.thread for each in caplog.records if "waiting up to 60 s" in each.message}) == 2)
            assert not opening.done()
            promote()
            assert looking.result()
            with opening.result() as store:
                assert store.batches()[0].counts == Counts(pending=1)


def test_a_server_that_stays_starting_up_is_an_error_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with cluster() as own:
        server = own.fresh()
        with own.starting_up():
            with pytest.raises(ServerUnreachable):
                Store(server, shutdown=clock)
            assert 1050 < clock.now_s <= 1060


def test_a_server_that_refuses_us_or_is_not_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with cluster() as own:
        with pytest.raises(ServerUnreachable):
            Store(PostgresAddress(own.url(user="nobody_here")), shutdown=clock)
        server = own.fresh()
        own.stop()
        with pytest.raises(ServerUnreachable):
            Store(server, shutdown=clock)
    assert clock.now_s < 1001


def test_everything_that_can_be_asked_is_done_on_a_new_connection(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as store:
        cut(store)
        assert store.shards(2) is not None
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        asks: list[Callable[[], object]] = [
            lambda: store.submissions.set_priority(batch.id, 3, sets_priority=lambda _: False),
            lambda: store.submissions.set_deadline(batch.id, 1e12),
            lambda: store.submissions.retire(batch.id),
            lambda: store.ask_cancel(batch.id),
            store.expire,
            lambda: store.submissions.seal(store.submissions.begin(Submission("n"), source="x", key=None), b"key"),
        ]
        for ask in asks:
            cut(store)
            ask()
        found = store.batch(batch.id)
        assert (found.priority, found.deadline_s) == (3, 1e12)
        assert store.cancel_requests() == [batch.id]
        cut(store)
        store.submissions.forget(batch.id)
        assert [batch.model_id for batch in store.batches()] == ["n"]


@pytest.mark.parametrize("which", range(5))
def test_what_was_done_and_not_acknowledged_is_not_done_twice(
    server: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Of the transactions that store a batch one is committed, and the connection breaks before that is said."""
    with Store(server) as store:
        database, left = database_of(store), [which]
        writing = database.writing

        @contextmanager
        def cut_off(*, durable: bool) -> Iterator[None]:
            with writing(durable=durable):
                yield
            left[0] -= 1
            if left[0] == -1:
                cut(store)
                raise ConnectionLost("gone", hint="")

        monkeypatch.setattr(database, "writing", cut_off)
        monkeypatch.setattr("tokenmill.jobs.ingest.submit.GROUP_LINES", 1)
        path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 300 for number in range(6000)])
        batch = submit(store, path, Submission("m", priority=1), processes=0).batch
        assert left[0] < -1  # it happened, and more followed
        assert (batch.counts, batch.lines) == (Counts(pending=6000), 6000)
        store.submissions.set_priority(batch.id, 4, sets_priority=lambda _: False)
        assert len(store.batches()) == 1
        assert len(pending(store, batch)) > 0
