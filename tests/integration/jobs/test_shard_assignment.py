"""Stretches of a real store among the workers of one process."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from support.jobs_store import Clock, answer, submitted
from tokenmill.jobs.models import Batch, Failure, JobId, QueuedJob
from tokenmill.jobs.sharding.local_shards import LocalShards
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.sqlite import Database
from tokenmill.jobs.store.store import Store

HEAD = "".join(f"Rule {number}: a report names its author, its date and its mill. " for number in range(40))


def prompts(*heads: int) -> list[str]:
    """So many questions behind each of some heads."""
    return [f"Digest {at}. {HEAD}Question {job}?" for at, jobs in enumerate(heads) for job in range(jobs)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store(tmp_path / "store", clock=clock) as opened:
        yield opened


def batch_of(store: Store, tmp_path: Path, *heads: int, name: str = "jobs", priority: int = 0) -> Batch:
    return submitted(store, tmp_path / f"{name}.jsonl", prompts(*heads), {"priority": priority})


def shared(store: Store, clock: Clock) -> LocalShards:
    return store.local_shards(clock=clock)


def digest(row: QueuedJob) -> bytes:
    return row.place[: 4 * 8]  # 1 KiB


def done(store: Store, rows: Sequence[QueuedJob]) -> None:
    started = store.start([row.id for row in rows])
    store.commit([answer(job.id) for job in started.running])


def apart(out: LocalShards) -> None:
    assert all(one.last < other.first for (_, one), (_, other) in pairwise(out.shards))


def take(view: ShardView, batch: Batch, *, again: bool = False, limit: int = 4096) -> list[QueuedJob]:
    return view.window([batch.id], again=again, limit=limit)


def test_every_head_is_one_workers_and_every_job_is_given_out_once(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, *[4] * 9), shared(store, clock)
    workers = {name: out.add(name, 2) for name in "abc"}
    seen: dict[str, list[QueuedJob]] = {name: [] for name in workers}
    for name in "abc" * 9:
        seen[name] += take(workers[name], batch)
        apart(out)
    every = [row.id for rows in seen.values() for row in rows]
    assert sorted(every) == sorted(row.id for row in store.waiting([batch.id], limit=100))
    heads = [{digest(row) for row in rows} for rows in seen.values()]
    assert sum(map(len, heads)) == 9
    assert all(heads)


def test_what_a_worker_has_is_not_for_others(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 4, 4), shared(store, clock)
    one, other = out.add("one", 1), out.add("other", 1)
    rows = take(one, batch)
    free = [row for row in store.waiting([batch.id], limit=100) if row not in rows]
    assert len(rows) == len(free) == 4
    assert all(one.has(row) and not other.has(row) for row in rows)
    assert all(one.has(row) and other.has(row) for row in free)


def test_what_is_read_is_given_again_only_from_the_beginning(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 8), shared(store, clock)
    one = out.add("one", 8)
    rows = take(one, batch, limit=3)
    assert len(rows) == 3
    assert len(take(one, batch)) == 5
    assert take(one, batch) == []
    done(store, rows)
    assert len(take(one, batch, again=True)) == 5


def test_a_worker_that_is_gone_gives_its_stretches_back(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 4, 4), shared(store, clock)
    one, other = out.add("one", 8), out.add("other", 8)
    rows = take(one, batch)
    assert len(rows) == 8
    assert take(other, batch) == []
    one.close()
    assert take(other, batch) == rows
    assert take(one, batch, again=True) == []  # a call that was on its way


def test_a_job_that_is_pending_again_is_its_owners(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 3, 3), shared(store, clock)
    one, other = out.add("one", 3), out.add("other", 3)
    rows, others = take(one, batch), take(other, batch)
    assert len(rows) == len(others) == 3
    store.start([rows[1].id])
    store.fail(rows[1].id, Failure("failed", "no luck"), retry_at_s=clock.now_s + 5)
    done(store, others)
    assert take(one, batch, again=True) == [rows[0], rows[2]]
    clock.now_s += 10
    assert not other.has(rows[1])
    assert [row.id for row in take(one, batch, again=True)] == [row.id for row in rows]


def test_a_job_that_is_pending_again_outside_all_stretches_is_anyones(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    batch, out = batch_of(store, tmp_path, 3), shared(store, clock)
    one, other = out.add("one", 3), out.add("other", 3)
    rows = take(one, batch)
    store.start([row.id for row in rows])
    assert take(one, batch) == []  # nothing is pending in its stretch, which ends
    store.release([rows[1].id])
    assert other.has(rows[1])
    assert [row.id for row in take(other, batch, again=True)] == [rows[1].id]
    assert not one.has(rows[1])


def test_who_has_nothing_takes_the_second_half_of_the_largest(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 4, 4, 4), shared(store, clock)
    one = out.add("one", 12)
    rows = take(one, batch)
    assert len(rows) == 12
    other = out.add("other", 2)
    assert take(other, batch) == []  # it may have work of its own
    taken = take(other, batch, again=True)
    assert len(taken) in (4, 8)
    assert taken == rows[-len(taken) :]
    assert not any(one.has(row) for row in taken)
    assert all(one.has(row) for row in rows[: -len(taken)])
    apart(out)
    assert take(other, batch, again=True) == taken  # it has something: no more is taken


def test_a_head_that_was_given_in_advance_goes_to_who_has_nothing(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 6, 6), shared(store, clock)
    busy = out.add("busy", 6)
    first = take(busy, batch, again=True, limit=6)
    store.start([row.id for row in first])
    ahead = take(busy, batch)
    late = out.add("late", 6)
    assert len(ahead) == 6
    assert take(late, batch, again=True) == ahead
    assert not any(busy.has(row) for row in ahead)
    assert [name for name, _ in out.shards] == ["late"]  # all of what the other began is running
    apart(out)


def test_a_head_is_not_computed_again_for_too_little(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 3), shared(store, clock)
    one, other = out.add("one", 3), out.add("other", 3)
    assert len(take(one, batch)) == 3
    assert take(other, batch, again=True) == []


def test_a_head_that_was_cut_is_gone_on_with_by_who_has_it(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, 30, 2, 2), shared(store, clock)
    every = store.waiting([batch.id], limit=100)
    large = max({digest(row) for row in every}, key=lambda head: sum(digest(row) == head for row in every))
    workers = [out.add(name, 2) for name in "abcd"]
    by_head: dict[bytes, set[int]] = {}
    for _ in range(20):
        for at, view in enumerate(workers):
            rows = take(view, batch)
            done(store, rows)
            for row in rows:
                by_head.setdefault(digest(row), set()).add(at)
        apart(out)
    assert store.batch(batch.id).finished
    assert len(by_head[large]) > 1
    assert all(len(at) == 1 for head, at in by_head.items() if head != large)


def test_a_faster_worker_gets_longer_stretches(store: Store, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    batch, out = submitted(store, path, [f"{number} alone" for number in range(1000)]), shared(store, clock)
    fast, slow = out.add("fast", 2), out.add("slow", 2)
    first = take(fast, batch), take(slow, batch)
    done(store, first[0])
    clock.now_s += 1
    second = take(fast, batch)
    done(store, second)
    clock.now_s += 1
    take(fast, batch)
    clock.now_s += 18
    done(store, first[1])
    slowly = take(slow, batch)
    left = 1000 - sum(map(len, (*first, second)))
    assert len(first[0]) == 250
    assert 2 <= len(slowly) < left / 10


def test_the_most_urgent_batch_is_shared_out_first(store: Store, clock: Clock, tmp_path: Path) -> None:
    later = batch_of(store, tmp_path, 4, name="later")
    first = submitted(store, tmp_path / "first.jsonl", ["x", "y"], {"priority": 5})
    out = shared(store, clock)
    one = out.add("one", 1)
    rows = one.window([later.id, first.id], again=False, limit=100)
    assert {JobId.batch(row.id) for row in rows} == {first.id}
    assert {JobId.batch(row.id) for row in one.window([later.id], again=False, limit=100)} == {later.id}
    assert {JobId.batch(row.id) for row in one.window([later.id], again=True, limit=100)} == {later.id}


def test_many_jobs_are_never_read_at_once(
    store: Store, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submitted(store, tmp_path / "jobs.jsonl", [f"job {number}" for number in range(60_000)])
    read: list[int] = []
    all_rows = Database.all

    def counted(self: Database, name: str, /, **values: Any) -> list[Any]:
        rows = all_rows(self, name, **values)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(Database, "all", counted)
    out = shared(store, clock)
    one, other = out.add("one", 8), out.add("other", 8)
    assert len(take(one, batch)) == len(take(other, batch)) == 4096
    assert max(read) <= 4096
    assert sum(read) < 50_000
    apart(out)


def test_workers_in_threads_get_each_job_once(store: Store, clock: Clock, tmp_path: Path) -> None:
    batch, out = batch_of(store, tmp_path, *[3] * 40), shared(store, clock)
    got: dict[int, list[int]] = {at: [] for at in range(4)}

    def work(at: int) -> None:
        view = out.add(str(at), 2)
        while rows := take(view, batch, again=True, limit=4):
            started = store.start([row.id for row in rows if view.has(row)])
            got[at] += [job.id for job in started.running]
            store.commit([answer(job.id) for job in started.running])

    threads = [Thread(target=work, args=(at,)) for at in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    every = [job for jobs in got.values() for job in jobs]
    assert len(every) == len(set(every)) == 120
    assert store.batch(batch.id).finished
