"""What runners on a server choose is what they would if each had read every pending job."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from support.jobs_store import Clock, answer
from support.postgres import Cluster
from tokenmill.errors import TooLong
from tokenmill.jobs.address import Server
from tokenmill.jobs.leased_shards import LeasedShardAllocator, _Portion
from tokenmill.jobs.models import Failure, SortKey, Submission, Waiting
from tokenmill.jobs.shard_allocator import WorkerShards
from tokenmill.jobs.shard_view import ShardView, WorkerSpec
from tokenmill.jobs.shards import Shard
from tokenmill.jobs.store import Store
from tokenmill.jobs.submit import submit

RUNNERS, TURNS, ROOM, NEEDED = 4, 30, 30, 60
HEAD = "".join(f"Rule {number}: a report names its author, its date and its mill. " for number in range(40))

pytestmark = pytest.mark.usefixtures("unkept")


class ByReadingAll(LeasedShardAllocator):
    """The same choices from all pending jobs, one after the other."""

    def _rows(self, worker: WorkerShards, batches: Sequence[int]) -> Iterator[Waiting]:
        return (row for row in self._store.waiting(batches, limit=100_000) if self._fits(worker, row.key))

    def _first_free(
        self, worker: WorkerShards, batches: Sequence[int], every: Sequence[Shard], after: SortKey | None
    ) -> Waiting | None:
        free = (row for row in self._rows(worker, batches) if not any(row.key in each for each in every))
        return next((row for row in free if after is None or row.key > after), None)

    def _several(self, worker: WorkerShards, stretches: Sequence[Shard]) -> list[list[Waiting]]:
        return [[row for row in self._rows(worker, [each.first[1]]) if row.key in each] for each in stretches]

    def _counts(self, every: Sequence[tuple[WorkerShards, Shard]], most: int) -> list[int]:
        return [min(most, len(self._several(worker, [stretch])[0])) for worker, stretch in every]


class Mill:
    """A store on a server and runners at it; everything it does follows from the numbers that it is given."""

    def __init__(self, kind: type[LeasedShardAllocator], server: Server, folder: Path, opened: ExitStack) -> None:
        self._kind, self._folder = kind, folder
        self._clock, self._wall, self._batches = Clock(), Clock(), list[int]()
        folder.mkdir()
        self._stores = [opened.enter_context(Store(server, clock=self._wall)) for _ in range(RUNNERS)]
        self._portions = [self._joined(number) for number in range(RUNNERS)]

    def _joined(self, number: int) -> _Portion:
        store = self._stores[number]
        found = _Portion(self._kind(store, store._database, store._standing, 2), store)
        found._shared._clock = self._clock
        found.ready(WorkerSpec("m", ROOM if number == 0 else None), 2)
        return found

    def submit(self, chance: Random) -> None:
        name = f"batch {len(self._batches)}"
        prompts = [
            f"{name} {head}. {HEAD}Question {job}?"
            for head in range(chance.randint(1, 8))
            for job in range(chance.choice([1, 2, 3, 9]))
        ]
        lines = [
            {"custom_id": str(number), "prompt": prompt, "priority": chance.choice([0, 0, 5])}
            for number, prompt in enumerate(prompts)
        ]
        path = self._folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._batches.append(submit(self._stores[0], path, Submission(model_id="m")).batch.id)

    def turn(self, chance: Random) -> tuple[list[Waiting], list[tuple[str, Shard]]]:
        """One runner asks for more and does a part of it; what it got, and who has what."""
        self._clock.now_s += chance.randint(1, 9)
        self._wall.now_s += chance.randint(0, 3)
        number = chance.randrange(RUNNERS)
        store, portion = self._stores[number], self._portions[number]
        rows = portion.window(self._batches, again=chance.random() < 0.5, limit=chance.choice([3, 4096]))
        every = [(worker.name, held.stretch) for worker in portion._shared._workers for held in worker.held]
        self._do(store, portion, chance.sample(rows, chance.randint(0, len(rows))), chance)
        if chance.random() < 0.1:
            portion.close()
            self._portions[number] = self._joined(number)
        return rows, sorted(every, key=lambda each: each[1].first)

    def _do(self, store: Store, portion: ShardView, rows: Sequence[Waiting], chance: Random) -> None:
        for row in store.start([row.id for row in rows]).running:
            luck = chance.random()
            if luck < 0.6:
                store.commit([answer(row.id)])
            elif luck < 0.7:
                store.fail(row.id, Failure("refused", "later"), retry_at_s=self._wall.now_s + 4)
            elif luck < 0.9:  # the others stay at work
                store.release([row.id])
                if luck < 0.8:
                    portion.too_long(row.id, TooLong("x", needed_tokens=NEEDED, context_tokens=ROOM))


@pytest.mark.parametrize("seed", range(8))
def test_the_same_is_chosen_as_by_reading_all(postgres: Cluster, tmp_path: Path, seed: int) -> None:
    with ExitStack() as opened:
        mill = Mill(LeasedShardAllocator, postgres.fresh(), tmp_path / "mill", opened)
        plain = Mill(ByReadingAll, postgres.fresh(), tmp_path / "plain", opened)
        one, other = Random(seed), Random(seed)
        got = 0
        for turn in range(TURNS):
            if turn % 10 == 0:
                mill.submit(one)
                plain.submit(other)
            found = mill.turn(one)
            assert found == plain.turn(other)
            got += len(found[0])
        assert got
