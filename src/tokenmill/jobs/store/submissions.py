"""Stores, changes and removes batches: `Submissions`.

The lines of a batch are stored in groups, in order, and then the batch is sealed. A group is acknowledged when it is
committed; on a server, which may crash while this process continues, when it is on the server's disk. A repeated
submission continues after the last stored line.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.jobs.models import Batch, JobId, State, Submission
from tokenmill.jobs.sharding.coordination import BeingStored, Coordinator, LinesLost
from tokenmill.jobs.store.backend import DatabaseBackend
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.units import number_of

_LATER = "run the same command again later"
_FORGET_LINES = 50_000  # deleted per transaction


class Submissions:
    """Stores, changes and removes whole batches; `Store.submissions`."""

    def __init__(self, database: DatabaseBackend, coordinator: Coordinator, reader: StoreReader) -> None:
        self._database = database
        self._coordinator = coordinator
        self._reader = reader

    def begin(self, how: Submission, *, source: str, key: bytes | None) -> int:
        """Create a batch without lines. Without a `key` it can be found only after it was sealed with one.

        Raises BeingStored if another process has created a batch with the same key.
        """
        values = {
            "name": how.name or f"batch_{secrets.token_hex(8)}",
            "key": key,
            "now": self._reader.now_s(),
            "source": source,
            "model_id": how.model_id,
            "output": how.output,
            "errors": how.errors,
            "reuse": int(how.reuse),
            "priority": how.priority or 0,
            "deadline_s": how.deadline_s,
            "defaults": json.dumps(dict(how.defaults)),
        }
        tries = count()

        def work() -> int:
            again = next(tries) > 0
            with self._database.writing(durable=self._database.shared):
                found = self._database.run("batch_named", name=values["name"]).fetchone() if again else None
                if (
                    found and self._reader.batch(found[0]).created_s == values["now"]
                ):  # committed, but the connection broke before the reply
                    return int(found[0])
                row = self._database.run("add_batch", **values).fetchone()
                if row is None:
                    raise BeingStored("another process is storing the same batch", hint=_LATER)
                batch: int = row[0]
                self._coordinator.claim_storing(batch)
            return batch

        return self._database.transaction(work)

    def add(
        self,
        batch: int,
        rows: Sequence[tuple[Any, ...]],
        blocks: Iterable[tuple[int, bytes]],
        *,
        after: int | None = None,
    ) -> None:
        """Store lines in one transaction: rows (`line.JobRow` or tuples) and blocks of text. Answered jobs are done.

        Raises UsageError for a duplicate custom_id, and then stores none of the lines. Raises LinesLost if `after` is
        given and is not the last stored line.
        """
        if not rows:
            return
        self._coordinator.renew_lease()
        texts = list(blocks)
        tries = count()
        self._database.transaction(lambda: self._add(batch, rows, texts, after, again=next(tries) > 0))

    def _add(
        self,
        batch: int,
        rows: Sequence[tuple[Any, ...]],
        blocks: Iterable[tuple[int, bytes]],
        after: int | None,
        *,
        again: bool,
    ) -> None:
        last = JobId.line(rows[-1][-1])
        with self._database.writing(durable=self._database.shared):
            run = self._database.run
            self._coordinator.claim_storing(batch)
            if again and self.last_line(batch) >= last:  # committed, but the connection broke before the reply
                return
            if after is not None:
                self._check_lines(batch, after)
            if self._database.many("add_job", rows) != len(rows):
                raise self._duplicate(batch, rows)
            self._database.many("add_block", blocks)
            for state, jobs in run("added", first=rows[0][-1], last=rows[-1][-1]).fetchall():
                run("count_added", batch=batch, state=state, jobs=jobs)
                if state == State.DONE:
                    run("count_reused", batch=batch, jobs=jobs)
            run("set_lines", batch=batch, lines=last)

    def last_line(self, batch: int) -> int:
        """The number of the last stored line, or 0."""
        row = self._database.one("last_job", **JobId.span(batch))
        return JobId.line(row[0] or 0)

    def seal(self, batch: int, key: bytes, *, last: int | None = None, jobs: int | None = None) -> Batch:
        """Mark a batch as complete; on disk when this returns.

        Raises LinesLost if the last stored line is not `last`, or the number of jobs is less than `jobs`.
        """

        def work() -> None:
            with self._database.writing(durable=True):
                if last is not None:
                    self._check_lines(batch, last)
                if jobs is not None and (missing := jobs - self._reader.batch(batch).counts.total):
                    raise _lost(number_of(missing, "line"))
                self._database.run("seal", batch=batch, key=key, now=self._reader.now_s())

        self._database.transaction(work)
        return self._reader.batch(batch)

    def storing(self, batch: int) -> str | None:
        """A description of the other process that stores the lines of a batch, if there is one."""
        return self._coordinator.storing(batch)

    def set_deadline(self, batch: int, deadline_s: float) -> int:
        """Change the deadline; returns the number of expired jobs that become pending again."""
        values = {"batch": batch, "deadline_s": deadline_s}

        def work() -> int:
            with self._database.writing(durable=True):
                self._database.run("set_deadline", **values)
                return self._database.run("revive_expired", now=self._reader.now_s(), **values).rowcount

        return self._database.transaction(work)

    def set_priority(self, batch: int, priority: int, *, sets_priority: Callable[[str], bool]) -> None:
        """Change the priority of all jobs whose lines do not set one; `sets_priority` examines a line."""
        before = self._reader.batch(batch)
        self._database.transaction(lambda: self._set_priority(before, priority, sets_priority))

    def _set_priority(self, before: Batch, priority: int, sets_priority: Callable[[str], bool]) -> None:
        batch = before.id
        with self._database.writing(durable=True):
            self._database.run("set_priority", batch=batch, priority=priority)
            if "priority" not in before.defaults:  # these apply to all lines
                ranks = {"rank": -priority, "was": -before.priority}
                for first, data in self._blocks(batch):
                    texts = data.split(b"\n") if b"priority" in data else []
                    kept = [
                        first + index
                        for index, text in enumerate(texts)
                        if b"priority" in text and sets_priority(text.decode(errors="replace").strip())
                    ]
                    # all jobs between two lines that set a priority
                    ends = [first - 1, *kept, first + data.count(b"\n") + (not data.endswith(b"\n"))]
                    for low, high in pairwise(ends):
                        self._database.run("rank_jobs", first=low + 1, last=high - 1, **ranks)

    def retire(self, batch: int) -> None:
        """Keep a batch, but let the same command create a new one."""

        def work() -> None:
            with self._database.writing(durable=False):
                self._database.run("drop_key", batch=batch)

        self._database.transaction(work)

    def forget(self, batch: int) -> None:
        """Remove a batch and its lines, but no answers. If interrupted, the next opening of the store continues."""
        self._database.transaction(lambda: self._forget(batch))

    def _forget(self, batch: int) -> None:
        with self._database.writing(durable=False):
            self._database.run("mark_removed", batch=batch)
        last = self.last_line(batch)
        for first in range(0, last + 1, _FORGET_LINES):
            span = {"first": JobId.of(batch, first), "last": JobId.of(batch, first + _FORGET_LINES - 1)}
            with self._database.writing(durable=False):
                self._database.run("forget_blocks", **span)
                self._database.run("forget_jobs", **span)
        with self._database.writing(durable=False):
            self._database.run("forget_batch", batch=batch)

    def _check_lines(self, batch: int, last: int) -> None:
        """Raise LinesLost unless `last` is the last stored line."""
        if (there := self.last_line(batch)) < last:
            raise _lost(f"lines {there + 1} to {last}")
        if there > last:
            raise LinesLost("another process has stored lines of this batch", hint="run the same command again")

    def _blocks(self, batch: int) -> Iterator[tuple[int, bytes]]:
        """Yield the text of a batch in blocks, each with the number of its first job."""
        after = JobId.of(batch, 0) - 1
        last = JobId.of(batch, JobId.MAX_LINE)
        while row := self._database.run("block_after", after=after, last=last).fetchone():
            yield row
            after = row[0]

    def _duplicate(self, batch: int, rows: Sequence[tuple[Any, ...]]) -> UsageError:
        for row in rows:
            custom_id = row[1]
            job = row[-1]
            found = self._database.run("holder_of_custom_id", batch=batch, custom_id=custom_id).fetchone()
            if custom_id is not None and found[0] != job:
                return UsageError(
                    f"lines {JobId.line(found[0])} and {JobId.line(job)} have the same custom_id {custom_id!r}",
                    hint="use unique custom_ids; a line without one is named line-N",
                    code="duplicate_custom_id",
                )
        raise AssertionError("the database refused a row without a conflict")


def _lost(lines: str) -> LinesLost:
    return LinesLost(
        f"{lines} of this batch were lost by the server after it had acknowledged them",
        hint="run the same command again to store them; fsync and synchronous_commit of the server should be on",
    )
