"""A store with many batches that are done: what a look costs does not grow with them, and nothing is written for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import answer, pending, submitted
from support.postgres import Cluster, asked, database_of
from tokenmill.jobs.models import Batch, Counts, Submission
from tokenmill.jobs.sharding.worker_lease import Leased
from tokenmill.jobs.store import reader as module
from tokenmill.jobs.store.address import Address, PostgresAddress
from tokenmill.jobs.store.backend import DatabaseBackend
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")


def finished(store: Store, path: Path) -> Batch:
    batch = submitted(store, path, [path.name])
    jobs = pending(store, batch)
    store.start(jobs)
    store.commit([answer(job) for job in jobs])
    return store.batch(batch.id)


class Counted:
    """A database that counts what it is asked."""

    def __init__(self, tables: DatabaseBackend) -> None:
        self._tables, self.queries = tables, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def all(self, name: str, /, **values: Any) -> list[Any]:
        self.queries.append(name)
        return self._tables.all(name, **values)

    def one(self, name: str, /, **values: Any) -> Any:
        self.queries.append(name)
        return self._tables.one(name, **values)


@pytest.fixture
def store(address: Address) -> Iterator[Store]:
    with Store(address) as one:
        yield one


def test_a_look_asks_as_often_however_many_there_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = [finished(store, tmp_path / f"d{number}") for number in range(6)]
    counted = Counted(store._database)
    monkeypatch.setattr(store, "_database", counted)
    assert store.batches() == done
    assert len(counted.queries) == 2
    counted.queries.clear()
    assert store.open_batches("m") == []
    assert len(counted.queries) == 1
    mine, other = (
        submitted(store, tmp_path / "a", ["a", "b"]),
        submitted(store, tmp_path / "b", ["c"], {"model_id": "n"}),
    )
    held = submitted(store, tmp_path / "c", ["e"])
    store.start(pending(store, held))
    store.submissions.begin(Submission("m"), source="x", key=None)  # half of it is there
    store.cancel(submitted(store, tmp_path / "f", ["f"]).id)
    assert mine.counts == Counts(pending=2)
    assert store.open_batches("m") == [mine]
    assert store.open_batches() == [mine, other]
    monkeypatch.setattr(module, "_FEW", 1)
    assert store.open_batches() == [mine, other]


def test_counts_are_folded_where_there_is_something_to_fold(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    with Store(server) as store:
        done = [finished(store, tmp_path / f"d{number}") for number in range(3)]
        fold(store)
        before = places(server)
        assert {(batch, state) for _, batch, state in before} == {(b.id, s) for b in done for s in range(3)}
        assert len(before) == 9
        fold(store)
        assert places(server) == before  # not a row was written
        late = finished(store, tmp_path / "late")
        fold(store)
        after = places(server)
        assert set(before) < set(after)
        assert {batch for _, batch, _ in set(after) - set(before)} == {late.id}
        assert [batch.counts for batch in store.batches()] == [Counts(done=1)] * 4
        assert [batch.totals.computed for batch in store.batches()] == [1] * 4


def fold(store: Store) -> None:
    assert isinstance(store._coordinator, Leased)
    database_of(store).transaction(store._coordinator._fold)


def places(server: PostgresAddress) -> list[tuple[str, int, int]]:
    """Where every row lies; one that is written anew lies elsewhere."""
    return [(str(row[0]), row[1], row[2]) for row in asked(server, "SELECT ctid, batch, state FROM counts")]


def test_batches_that_are_overdue_and_done_cost_nothing(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(postgres.fresh()) as store:
        late = submitted(store, tmp_path / "a", ["a"], {"deadline_s": store.now_s() - 60})
        assert late.counts == Counts(failed=1)
        run, ran = database_of(store).run, list[str]()

        def noted(name: str, /, **values: Any) -> Any:
            ran.append(name)
            return run(name, **values)

        monkeypatch.setattr(database_of(store), "run", noted)
        assert store.expire() == 0
        assert ran == ["expire_jobs", "overdue_batches"]
