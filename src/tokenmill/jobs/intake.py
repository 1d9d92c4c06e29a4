"""Batches as they come into the store: lines in groups, sealed when all are there, and what their order is.

A group is acknowledged when it holds. On a server, which may crash while this process goes on, that is when it is on
its disk; and what follows is only stored behind what is there.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import count, pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

from tokenmill.errors import UsageError
from tokenmill.jobs.coordination import BeingStored, Coordinator, LinesLost
from tokenmill.jobs.models import Batch, JobId, State, Submission
from tokenmill.jobs.reader import Reader
from tokenmill.units import number_of

_FORGET_LINES = 50_000  # deleted in one transaction

P = ParamSpec("P")
T = TypeVar("T")


def _repeated(method: "Callable[Concatenate[Intake, P], T]") -> "Callable[Concatenate[Intake, P], T]":
    """What may be done again from its beginning, where the connection broke before it was acknowledged."""

    @wraps(method)
    def done(self: "Intake", /, *args: P.args, **named: P.kwargs) -> T:
        return self._database.whole(lambda: method(self, *args, **named))

    return done


class Intake(Reader):
    """The half of a store that takes batches in."""

    _standing: Coordinator

    def begin(self, how: Submission, *, source: str, key: bytes | None) -> int:
        """A new batch without lines; `key` None: it is found again only when it is sealed with one.

        BeingStored: another process has begun the same.
        """
        values = {
            "name": how.name or f"batch_{secrets.token_hex(8)}",
            "key": key,
            "now": self._now(),
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
                if found and self.batch(found[0]).created_s == values["now"]:  # only the word of it was lost
                    return int(found[0])
                row = self._database.run("add_batch", **values).fetchone()
                if row is None:
                    raise BeingStored("another process has begun the same batch", hint="the same command finds it")
                batch: int = row[0]
                self._standing.take_up(batch)
            return batch

        return self._database.whole(work)

    def add(
        self,
        batch: int,
        rows: Sequence[tuple[Any, ...]],
        blocks: Iterable[tuple[int, bytes]],
        *,
        after: int | None = None,
    ) -> None:
        """Store lines in one transaction (`line.Row`s, or plain tuples, and blocks of text); those answered are done.

        UsageError names a custom_id that is there already, and both lines; none of these lines is stored then.
        `after`: the last line that was stored before these; LinesLost where that is not so.
        """
        if not rows:
            return
        self._standing.tend()
        texts = list(blocks)
        tries = count()
        self._database.whole(lambda: self._add(batch, rows, texts, after, again=next(tries) > 0))

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
            self._standing.take_up(batch)
            if again and self.last_line(batch) >= last:  # only the word of it was lost
                return
            if after is not None:
                self._check_lines(batch, after)
            if self._database.many("add_job", rows) != len(rows):
                raise self._twice(batch, rows)
            self._database.many("add_block", blocks)
            for state, jobs in run("added", first=rows[0][-1], last=rows[-1][-1]).fetchall():
                run("count_added", batch=batch, state=state, jobs=jobs)
                if state == State.DONE:
                    run("count_reused", batch=batch, jobs=jobs)
            run("set_lines", batch=batch, lines=last)

    def last_line(self, batch: int) -> int:
        """The last line that is stored; 0: none."""
        row = self._database.one("last_job", **JobId.span(batch))
        return JobId.line(row[0] or 0)

    @_repeated
    def seal(self, batch: int, key: bytes, *, last: int | None = None, jobs: int | None = None) -> Batch:
        """All lines are there, and on the disk when this returns.

        `last` and `jobs`: the last line that was read, and how many were; LinesLost where others are stored.
        """
        with self._database.writing(durable=True):
            if last is not None:
                self._check_lines(batch, last)
            if jobs is not None and (missing := jobs - self.batch(batch).counts.total):
                raise _lost(number_of(missing, "line"))
            self._database.run("seal", batch=batch, key=key, now=self._now())
        return self.batch(batch)

    def storing(self, batch: int) -> str | None:
        """Who else stores the lines of a batch, for people; None: nobody does."""
        return self._standing.storing(batch)

    @_repeated
    def set_deadline(self, batch: int, deadline_s: float) -> int:
        """Another deadline. Jobs that were given up for the one before are pending again; how many."""
        with self._database.writing(durable=True):
            self._database.run("set_deadline", batch=batch, deadline_s=deadline_s)
            return self._database.run("revive_expired", batch=batch, now=self._now(), deadline_s=deadline_s).rowcount

    def set_priority(self, batch: int, priority: int, *, stated: Callable[[str], bool]) -> None:
        """Another priority for all jobs whose lines do not state one."""
        before = self.batch(batch)
        self._database.whole(lambda: self._set_priority(before, priority, stated))

    def _set_priority(self, before: Batch, priority: int, stated: Callable[[str], bool]) -> None:
        batch = before.id
        with self._database.writing(durable=True):
            self._database.run("set_priority", batch=batch, priority=priority)
            if "priority" not in before.defaults:  # these are as good as stated
                ranks = {"rank": -priority, "was": -before.priority}
                for first, data in self._blocks(batch):
                    texts = data.split(b"\n") if b"priority" in data else []
                    kept = [
                        first + index
                        for index, text in enumerate(texts)
                        if b"priority" in text and stated(text.decode(errors="replace").strip())
                    ]
                    # Between two lines that state one, all others.
                    ends = [first - 1, *kept, first + data.count(b"\n") + (not data.endswith(b"\n"))]
                    for low, high in pairwise(ends):
                        self._database.run("rank_jobs", first=low + 1, last=high - 1, **ranks)

    @_repeated
    def retire(self, batch: int) -> None:
        """The batch stays, but the same command makes a new one."""
        with self._database.writing(durable=False):
            self._database.run("drop_key", batch=batch)

    @_repeated
    def forget(self, batch: int) -> None:
        """Remove a batch and its lines; answers stay. What a kill leaves of it is removed at the next opening."""
        with self._database.writing(durable=False):
            self._database.run("doom", batch=batch)
        last = self.last_line(batch)
        for first in range(0, last + 1, _FORGET_LINES):
            span = {"first": JobId.of(batch, first), "last": JobId.of(batch, first + _FORGET_LINES - 1)}
            with self._database.writing(durable=False):
                self._database.run("forget_blocks", **span)
                self._database.run("forget_jobs", **span)
        with self._database.writing(durable=False):
            self._database.run("forget_batch", batch=batch)

    def _check_lines(self, batch: int, last: int) -> None:
        """Nothing that was acknowledged is missing, and nobody came in between."""
        if (there := self.last_line(batch)) < last:
            raise _lost(f"lines {there + 1} to {last}")
        if there > last:
            raise LinesLost("another process stored lines of this batch meanwhile", hint="run the same command again")

    def _blocks(self, batch: int) -> Iterator[tuple[int, bytes]]:
        """The text of a batch with the number of each block's first job."""
        after = JobId.of(batch, 0) - 1
        last = JobId.of(batch, JobId.MAX_LINE)
        while row := self._database.run("block_after", after=after, last=last).fetchone():
            yield row
            after = row[0]

    def _twice(self, batch: int, rows: Sequence[tuple[Any, ...]]) -> UsageError:
        for row in rows:
            custom_id = row[1]
            job = row[-1]
            found = self._database.run("holder_of_custom_id", batch=batch, custom_id=custom_id).fetchone()
            if custom_id is not None and found[0] != job:
                return UsageError(
                    f"custom_id {custom_id!r} is on line {JobId.line(found[0])} and again on line {JobId.line(job)}",
                    hint="every line of a file needs its own; without one a line is called line-N",
                )
        raise AssertionError("a row was refused that nothing stands against")


def _lost(lines: str) -> LinesLost:
    return LinesLost(
        f"{lines} of this batch were stored and are gone: the server lost what it had acknowledged",
        hint="the same command stores them again; fsync and synchronous_commit of the server should be on",
    )
