"""A connection that is gone here and not on the server: our own ghost does not keep us from what is ours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cut_line import Line, line
from support.jobs_store import pending, submitted
from support.postgres import Cluster, asked, database_of
from tokenmill.errors import StoreInUse
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.store import postgres
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.postgres_session import PostgresBackend, end
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")


@pytest.fixture
def wire(postgres: Cluster) -> Iterator[Line]:
    with line(postgres.folder / ".s.PGSQL.5432") as one:
        yield one


@pytest.fixture
def store(server: PostgresAddress, wire: Line) -> Iterator[Store]:
    schema = server.url.rpartition("%3D")[2]
    with Store(
        PostgresAddress(f"postgresql://mill@127.0.0.1:{wire.port}/postgres?options=-csearch_path%3D{schema}")
    ) as one:
        yield one


def writing(store: Store, path: Path) -> Batch:
    batch = submitted(store, path, ["a", "b"])
    store.start(pending(store, batch)[:1])
    assert store.claim_output(batch.id)
    return batch


def holders(server: PostgresAddress) -> int:
    text = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 'batches'::regclass::oid"
    return int(asked(server, text)[0][0])


def test_the_output_stays_ours_when_the_line_is_cut(
    server: PostgresAddress, wire: Line, store: Store, tmp_path: Path
) -> None:
    batch = writing(store, tmp_path / "j")
    for _ in range(2):
        before = database_of(store)._backend
        assert wire.cut() == 1
        assert store.batch(batch.id).counts == Counts(pending=1, running=1)
        assert database_of(store)._backend.pid != before.pid
        assert holders(server) == 1
        with Store(server) as other:
            assert not other.claim_output(batch.id)


def test_a_ghost_that_only_the_server_can_end_is_waited_for(
    server: PostgresAddress, wire: Line, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, ghost = writing(store, tmp_path / "j"), database_of(store)._backend
    monkeypatch.setattr(postgres, "end", lambda *_: None)
    waits = list[float]()

    def pause(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 3:
            asked(server, "SELECT pg_terminate_backend(?, 60000)", ghost.pid)

    monkeypatch.setattr(database_of(store), "pause", pause)
    wire.cut()
    assert store.batch(batch.id).counts == Counts(pending=1, running=1)
    assert len(waits) == 3
    assert holders(server) == 1


def test_an_output_that_another_has_by_now_is_not_ours(server: PostgresAddress, store: Store, tmp_path: Path) -> None:
    batch, gone = writing(store, tmp_path / "j"), database_of(store)._backend
    asked(server, "SELECT pg_terminate_backend(?, 60000)", gone.pid)
    with Store(server) as other:
        assert other.claim_output(batch.id)
        for _ in range(2):
            with pytest.raises(StoreInUse, check=lambda error: error.code == "output_claimed"):
                store.batch(batch.id)


def test_a_process_of_the_same_number_is_left_alone(server: PostgresAddress) -> None:
    """Numbers are used again: it is ours only if it began when ours did."""
    with Store(server) as one, Store(server) as two:
        mine = database_of(one)._backend
        other = database_of(two)._backend
        wrong = PostgresBackend(other.pid, mine.began, 0.0)
        end(database_of(one)._connection, wrong)
        assert asked(server, "SELECT 1 FROM pg_stat_activity WHERE pid = ?", other.pid) == [(1,)]
        end(database_of(one)._connection, other)
        assert asked(server, "SELECT 1 FROM pg_stat_activity WHERE pid = ?", other.pid) == []
