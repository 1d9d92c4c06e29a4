"""A job file into the store: read, checked, stored, sealed.

The same file with the same model, output and defaults is the same batch: submitting it again goes on where the first
time stopped, in the middle of the file or at its end. A file that is refused leaves nothing behind. Jobs that are too
late fail here: nobody is to load an engine for them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tokenmill.errors import StoreInUse, UsageError
from tokenmill.jobs.job import INVALID_LINE, MOST_LINES, Batch, State, Submission
from tokenmill.jobs.line import Reading, Row, blocks
from tokenmill.jobs.parsing import parsed
from tokenmill.jobs.read import BadLine, Chunk, Source, open_source
from tokenmill.jobs.reschedule import Rescheduled, reschedule
from tokenmill.jobs.runners import BeingStored, LinesLost
from tokenmill.jobs.store import Store
from tokenmill.units import MIB

GROUP_LINES = 65_536  # in one transaction: each writes the pages of an index that its lines fall into
FIRST_GROUP_LINES = 4096  # few, so that work can begin while the rest is read
GROUP_BYTES = 64 * MIB
_SHOWN = 3
_LOOK_S = 0.5  # how another process gets on
_MOST_TRIES = 10


@dataclass(frozen=True, slots=True)
class Submitted:
    """What came of it."""

    batch: Batch
    continued: bool  # the batch was there before
    changed: Rescheduled | None = None  # its deadline or priority; None: neither


def submit(
    store: Store,
    where: str | Path,
    how: Submission,
    *,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
    fresh: Callable[[], None] | None = None,
    called: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Submitted:
    """Store the jobs of a file; `progress` is told the last line that is stored.

    `called`: what the batch is said to be from, where a person knows it by another name than the file's.
    Where another process stores the same at this moment it is waited for, which `tell` is told; if that one is lost,
    this one goes on in its place.

    `fresh` is called before a batch is stored that was not there, and may refuse it with a UsageError.
    A finished batch that was computed without reuse is done anew when it is submitted again. A deadline or a priority
    holds for a batch that was there before, too.
    """
    return _Submission(store, where, how, processes, progress, fresh, called, tell).done()


@dataclass(slots=True)
class _Submission:
    """One submission, begun again from what is stored where another process or a crash came in between."""

    store: Store
    where: str | Path
    how: Submission
    processes: int | None
    progress: Callable[[int], None] | None
    fresh: Callable[[], None] | None
    called: str | None
    tell: Callable[[str], None] | None
    begun: int | None = None  # the batch that was made here
    waited: bool = False  # for another process to store it

    def done(self) -> Submitted:
        """Every line is stored, and the batch sealed."""
        for tries in count(1):
            with open_source(self.where) as source:
                if source.digest is None:
                    return self._stream(source)
                key = batch_key(self.how, source.digest)
                try:
                    return self._file(source, key)
                except BeingStored:
                    self._wait(key)
                except LinesLost:
                    if tries >= _MOST_TRIES:
                        raise
        raise AssertionError("it ends one way or the other")

    def _file(self, source: Source, key: bytes) -> Submitted:
        """What can be read again: the same batch is found by what is in it."""
        store, how, known = self.store, self.how, self.store.find(key)
        anew = known is not None and known.finished and not how.reuse and not self.waited
        if known and how.strict:
            _refuse_known_bad(store, known)
        if known and known.sealed_s is not None and not anew:
            return _again(store, known, how)
        if known and (who := store.storing(known.id)):
            raise BeingStored(f"{who} is storing the lines of this batch", hint="the same command finds it")
        if self.fresh:
            self.fresh()
        if known and anew:
            store.retire(known.id)
            known = None
        batch = known.id if known else self._begin(source, key)
        try:
            last, jobs = self._store_lines(batch, source)
        except UsageError:
            store.forget(batch)
            raise
        sealed = store.seal(batch, key, last=last, jobs=jobs)
        return _in_time(store, Submitted(sealed, continued=batch != self.begun))

    def _stream(self, source: Source) -> Submitted:
        """What comes once: only at its end it is known which batch it is."""
        store, batch = self.store, self._begin(source, None)
        try:
            last, jobs = self._store_lines(batch, source)
            key = batch_key(self.how, source.digest or "")
            if store.find(key) is None and self.fresh:
                self.fresh()
        except UsageError:
            store.forget(batch)
            raise
        while True:
            self._wait(key)
            if (twin := store.find(key)) and twin.sealed_s is not None:  # it was here before
                store.forget(batch)
                return _again(store, twin, self.how)
            if twin:  # half of it, from a process that is gone; here is all of it
                store.retire(twin.id)
            try:
                return _in_time(store, Submitted(store.seal(batch, key, last=last, jobs=jobs), continued=False))
            except StoreInUse:  # another has just begun the same
                continue

    def _begin(self, source: Source, key: bytes | None) -> int:
        self.begun = self.store.begin(self.how, source=self.called or source.name, key=key)
        return self.begun

    def _wait(self, key: bytes) -> None:
        """Until no other process stores the batch any more: it is sealed, or that one is lost."""
        said = False
        while (batch := self.store.find(key)) and batch.sealed_s is None and (who := self.store.storing(batch.id)):
            if self.tell and not said:
                self.tell(f"{who} is storing the same jobs; waiting for it")
            said = self.waited = True
            self.store.tend()
            time.sleep(_LOOK_S)

    def _store_lines(self, batch: int, source: Source) -> tuple[int, int]:
        """The lines that are not stored yet; the last line and the number of jobs that must be there then."""
        store, how = self.store, self.how
        last = store.last_line(batch)
        jobs = store.batch(batch).counts.total
        reading = Reading(batch, how.model_id, how.priority or 0, how.reuse, how.defaults)
        lines = (new for item in source.chunks() if (new := _after(item, last)))
        for rows, texts in _groups(parsed(lines, reading, self.processes), batch):
            if how.strict:
                _refuse_bad(rows, source.name)
            store.add(batch, rows, texts, after=last)
            last, jobs = rows[-1][-1] & MOST_LINES, jobs + len(rows)
            if self.progress:
                self.progress(last)
        return last, jobs


def _again(store: Store, batch: Batch, how: Submission) -> Submitted:
    """A batch that was there before, with what the submission says of its order."""
    changed = reschedule(store, batch, how)
    found = Submitted(changed.batch, continued=True, changed=changed if changed.deadline or changed.priority else None)
    return _in_time(store, found)


def _in_time(store: Store, found: Submitted) -> Submitted:
    """The same without jobs whose deadline has passed: they have failed."""
    if found.batch.finished or not store.expire():
        return found
    return replace(found, batch=store.batch(found.batch.id))


def batch_key(how: Submission, digest: str) -> bytes:
    """What makes two submissions the same batch."""
    parts = [how.model_id, how.output, how.errors, how.reuse, dict(how.defaults), digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _groups(
    items: Iterable[tuple[Chunk | BadLine, list[Row]]], batch: int
) -> Iterator[tuple[list[Row], list[tuple[int, bytes]]]]:
    """Rows and blocks of text that are stored together; blank lines alone make none."""
    rows, texts, texts_bytes = list[Row](), list[tuple[int, bytes]](), 0
    most_lines = min(FIRST_GROUP_LINES, GROUP_LINES)
    for item, found in items:
        rows += found
        if isinstance(item, Chunk):
            texts += blocks(item, batch)
            texts_bytes += len(item.data)
        if rows and (len(rows) >= most_lines or texts_bytes >= GROUP_BYTES):
            yield rows, texts
            rows, texts, texts_bytes, most_lines = [], [], 0, min(GROUP_LINES, 4 * most_lines)
    if rows:
        yield rows, texts


def _after(item: Chunk | BadLine, stored: int) -> Chunk | BadLine | None:
    """What of a chunk follows the lines that are stored."""
    if isinstance(item, BadLine):
        return item if item.number > stored else None
    known = stored + 1 - item.first
    if known <= 0:
        return item
    rest = item.data.split(b"\n", known)[known:]
    return Chunk(stored + 1, rest[0]) if rest and rest[0] else None


def _refuse_bad(rows: Sequence[Row], name: str) -> None:
    _refuse([(row[-1] & MOST_LINES, row[9]) for row in rows if row[0] == State.FAILED], name)


def _refuse_known_bad(store: Store, batch: Batch) -> None:
    """The same for a batch that was submitted before without being strict."""
    after = 0
    while page := store.failures(batch.id, after, 1000):
        _refuse([(item.number, item.message) for item in page if item.code == INVALID_LINE], batch.source)
        after = page[-1].number


def _refuse(bad: Sequence[tuple[int, str | None]], name: str) -> None:
    if bad:
        shown = "; ".join(f"line {number}: {reason}" for number, reason in bad[:_SHOWN])
        raise UsageError(f"{name} has lines that cannot be run: {shown}",
                         hint="mend them, or leave --strict out: they become error lines, the rest runs")  # fmt: skip
