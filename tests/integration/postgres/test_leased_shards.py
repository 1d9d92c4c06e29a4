"""Stretches among runners on one server: every head is one runner's, and what a runner had goes with it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from support.jobs_store import answer, submitted
from support.postgres import asked
from tokenmill.jobs.models import Batch, JobId, QueuedJob
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store

HEAD = "".join(f"Rule {number}: a report names its author, its date and its mill. " for number in range(40))

pytestmark = pytest.mark.usefixtures("unkept")


@pytest.fixture
def stores(server: PostgresAddress) -> Iterator[tuple[Store, Store, Store]]:
    with Store(server) as one, Store(server) as two, Store(server) as three:
        yield one, two, three


def batch_of(store: Store, folder: Path, *heads: int, name: str = "jobs", priority: int = 0) -> Batch:
    prompts = [f"{name} {at}. {HEAD}Question {job}?" for at, jobs in enumerate(heads) for job in range(jobs)]
    return submitted(store, folder / f"{name}.jsonl", prompts, {"priority": priority})


def view(store: Store, lanes: int = 2) -> ShardView:
    found = store.shards(lanes)
    assert found is not None
    return found


def take(one: ShardView, batch: Batch, *, again: bool = False) -> list[QueuedJob]:
    return one.window([batch.id], again=again, limit=4096)


def done(store: Store, rows: Sequence[QueuedJob]) -> None:
    store.commit([answer(job.id) for job in store.start([row.id for row in rows]).running])


def digests(rows: Sequence[QueuedJob]) -> set[bytes]:
    return {row.place[: 4 * 8] for row in rows}  # 1 KiB


def test_every_head_is_one_runners_and_every_job_is_given_out_once(
    stores: tuple[Store, Store, Store], server: PostgresAddress, tmp_path: Path
) -> None:
    batch = batch_of(stores[0], tmp_path, *[4] * 9)
    views = [view(store) for store in stores]
    seen: list[list[QueuedJob]] = [[], [], []]
    for turn in range(27):
        seen[turn % 3] += take(views[turn % 3], batch)
        columns = ", ".join(f"{end}_{name}" for end in ("first", "last") for name in ("rank", "batch", "place", "id"))
        ends = sorted((row[:4], row[4:]) for row in asked(server, f"SELECT {columns} FROM stretches"))
        assert all(one[1] < other[0] for one, other in pairwise(ends))
    every = [row.id for rows in seen for row in rows]
    assert sorted(every) == sorted(row.id for row in stores[0].waiting([batch.id], limit=100))
    assert sum(len(digests(rows)) for rows in seen) == 9
    assert all(seen)
    for index, rows in enumerate(seen):
        views[index].refresh()
        assert all(views[index].has(row) for row in rows)
        assert not any(views[index - 1].has(row) for row in rows)


def test_a_runner_without_work_takes_a_part_of_anothers(stores: tuple[Store, Store, Store], tmp_path: Path) -> None:
    one, two, _ = stores
    batch = batch_of(one, tmp_path, *[6] * 6)
    first = view(one)
    rows = take(first, batch)
    while more := take(first, batch):
        rows += more
    assert len(rows) == 36
    second = view(two)
    taken = take(second, batch, again=True)
    assert taken
    first.refresh()
    assert not any(first.has(row) for row in taken)
    kept = [row for row in rows if row not in taken]
    assert digests(kept).isdisjoint(digests(taken))
    assert take(first, batch, again=True) == kept


def test_what_another_got_in_advance_is_taken_whole(stores: tuple[Store, Store, Store], tmp_path: Path) -> None:
    """One head to a stretch: no part of it would be worth its head, but all of it is."""
    one, two, three = stores
    batch = batch_of(one, tmp_path, *[6] * 6)
    first, second, _ = view(one), view(two), view(three)
    rows = take(first, batch)
    while more := take(first, batch):
        rows += more
    taken = take(second, batch, again=True)
    assert len(rows) == 36
    assert len(taken) == 6
    assert take(first, batch, again=True) == [row for row in rows if row not in taken]


def test_what_a_runner_had_is_free_when_it_leaves_or_is_lost(
    stores: tuple[Store, Store, Store], server: PostgresAddress, tmp_path: Path
) -> None:
    one, two, three = stores
    batch = batch_of(one, tmp_path, *[4] * 4)
    leaves, lost, stays = view(one), view(two), view(three)
    first, second = take(leaves, batch), take(lost, batch)
    assert first
    assert second
    leaves.close()
    asked(
        server,
        "UPDATE runners SET kernel = 'elsewhere', lease_until = clock_timestamp() - interval '1 second' WHERE id = ?",
        two._coordinator.id,
    )
    Store(server).close()
    found: list[QueuedJob] = []
    while more := take(stays, batch, again=True):
        found += more
        done(three, more)
    assert len(found) == 16
    # Whoever was taken for lost and is not asks again, and is one of them again.
    later = batch_of(one, tmp_path, 4, name="later")
    two._coordinator.renew_lease()
    assert take(lost, later, again=True)
    assert take(leaves, later, again=True) == []  # a call that was on its way


def test_a_batch_of_higher_priority_is_next(stores: tuple[Store, Store, Store], tmp_path: Path) -> None:
    one, two, _ = stores
    batch = batch_of(one, tmp_path, 4, 4)
    mine = view(one)
    assert take(mine, batch)
    urgent = batch_of(two, tmp_path, 4, name="urgent", priority=5)
    theirs = view(two)
    rows = theirs.window([batch.id, urgent.id], again=True, limit=4096)
    assert {JobId.batch(row.id) for row in rows} == {urgent.id}
