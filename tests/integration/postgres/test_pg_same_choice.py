"""What workers choose is what they would if each had read every pending job; so it is in a folder and on a server."""

import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from support.jobs_store import Clock, answer
from support.postgres import Cluster
from tokenmill.errors import TooLong
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Failure, QueuedJob, Submission
from tokenmill.jobs.sharding.allocator import ShardAllocator
from tokenmill.jobs.sharding.policy import Shard, Span
from tokenmill.jobs.sharding.postgres_shards import leased_view
from tokenmill.jobs.sharding.reader import ShardReader
from tokenmill.jobs.sharding.view import ShardView, WorkerSpec
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store

RUNNERS, TURNS, ROOM, NEEDED = 4, 30, 30, 60
HEAD = "".join(f"Rule {number}: a report names its author, its date and its mill. " for number in range(40))

pytestmark = pytest.mark.usefixtures("unkept")


class ByReadingAll(ShardReader):
    """The same from all pending jobs, one after the other."""

    def _rows(self, span: Span, unfit: Collection[int]) -> list[QueuedJob]:
        rows = self._store.waiting([span.after[1]], limit=100_000)
        return [row for row in rows if span.after < row.key < span.until and row.id not in unfit]

    def first(self, spans: Sequence[Span], unfit: Collection[int]) -> QueuedJob | None:
        return min((row for span in spans for row in self._rows(span, unfit)), key=lambda row: row.key, default=None)

    def rows(self, spans: Sequence[Span], unfit: Collection[int], limit: int) -> list[list[QueuedJob]]:
        return [self._rows(span, unfit)[:limit] for span in spans]

    def counts(self, spans: Sequence[Span], unfit: Collection[int], limit: int) -> list[int]:
        return [min(limit, len(self._rows(span, unfit))) for span in spans]


class Mill:
    """A store and workers at it; everything it does follows from the numbers that it is given."""

    def __init__(self, reader: type[ShardReader], address: Address, folder: Path, opened: ExitStack) -> None:
        self._reader, self._folder = reader, folder
        self._clock, self._wall, self._batches = Clock(), Clock(), list[int]()
        folder.mkdir()
        stores = 1 if isinstance(address, Path) else RUNNERS
        self._stores = [opened.enter_context(Store(address, clock=self._wall)) for _ in range(stores)]
        self._stores *= RUNNERS // stores
        self._table = self._stores[0].local_shards(clock=self._clock) if stores == 1 else None
        self._views = [self._joined(number) for number in range(RUNNERS)]

    def _joined(self, number: int) -> ShardAllocator:
        store = self._stores[number]
        if self._table is None:
            found = leased_view(store, store._database, store._coordinator, 2)
            found._clock = self._clock
        else:
            found = self._table.add(str(number), 2)
        found._table.reader = self._reader(store, store._database)  # type: ignore[misc]
        found.register(WorkerSpec("m", ROOM if number == 0 else None), 2)
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

    def turn(self, chance: Random) -> tuple[list[QueuedJob], list[tuple[str, Shard]]]:
        """One runner asks for more and does a part of it; what it got, and who has what."""
        self._clock.now_s += chance.randint(1, 9)
        self._wall.now_s += chance.randint(0, 3)
        number = chance.randrange(RUNNERS)
        store, view = self._stores[number], self._views[number]
        rows = view.window(self._batches, again=chance.random() < 0.5, limit=chance.choice([3, 4096]))
        every = [(worker.name, each.shard) for worker in view._table.workers for each in worker.assigned]
        self._do(store, view, chance.sample(rows, chance.randint(0, len(rows))), chance)
        if chance.random() < 0.1:
            view.close()
            self._views[number] = self._joined(number)
        return rows, sorted(every, key=lambda each: each[1].first)

    def _do(self, store: Store, view: ShardView, rows: Sequence[QueuedJob], chance: Random) -> None:
        for row in store.start([row.id for row in rows]).running:
            luck = chance.random()
            if luck < 0.6:
                store.commit([answer(row.id)])
            elif luck < 0.7:
                store.fail(row.id, Failure("refused", "later"), retry_at_s=self._wall.now_s + 4)
            elif luck < 0.9:  # the others stay at work
                store.release([row.id])
                if luck < 0.8:
                    view.too_long(row.id, TooLong("x", needed_tokens=NEEDED, context_tokens=ROOM))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("server", [False, True])
def test_the_same_is_chosen_as_by_reading_all(postgres: Cluster, tmp_path: Path, seed: int, server: bool) -> None:
    first, second = (postgres.fresh() if server else tmp_path / name for name in ("one", "other"))
    with ExitStack() as opened:
        mill = Mill(ShardReader, first, tmp_path / "mill", opened)
        plain = Mill(ByReadingAll, second, tmp_path / "plain", opened)
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
