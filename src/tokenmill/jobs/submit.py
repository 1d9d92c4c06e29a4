"""A job file into the store: read, checked, stored, sealed.

The same file with the same model, output and defaults is the same batch: submitting it again goes on where the first
time stopped, in the middle of the file or at its end. A file that is refused leaves nothing behind. Jobs that are too
late fail here: nobody is to load an engine for them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.jobs.job import INVALID_LINE, MOST_LINES, Batch, State, Submission
from tokenmill.jobs.line import Reading, Row, blocks
from tokenmill.jobs.parsing import parsed
from tokenmill.jobs.read import BadLine, Chunk, Source, open_source
from tokenmill.jobs.reschedule import Rescheduled, reschedule
from tokenmill.jobs.store import Store
from tokenmill.units import MIB

GROUP_LINES = 65_536  # in one transaction: each writes the pages of an index that its lines fall into
FIRST_GROUP_LINES = 4096  # few, so that work can begin while the rest is read
GROUP_BYTES = 64 * MIB
_SHOWN = 3


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
) -> Submitted:
    """Store the jobs of a file; `progress` is told the last line that is stored.

    `called`: what the batch is said to be from, where a person knows it by another name than the file's.

    `fresh` is called before a batch is stored that was not there, and may refuse it with a UsageError.
    A finished batch that was computed without reuse is done anew when it is submitted again. A deadline or a priority
    holds for a batch that was there before, too.
    """
    with open_source(where) as source:
        known = store.find(batch_key(how, source.digest)) if source.digest else None
        anew = known is not None and known.finished and not how.reuse
        if known and how.strict:
            _refuse_known_bad(store, known)
        if known and known.sealed_s is not None and not anew:
            return _again(store, known, how)
        if source.digest and fresh:
            fresh()
        if known and anew:
            store.retire(known.id)
            known = None
        key = batch_key(how, source.digest) if source.digest else None
        batch = known.id if known else store.begin(how, source=called or source.name, key=key)
        try:
            _store_lines(store, batch, source, how, processes, progress)
            key = batch_key(how, source.digest or "")
            twin = store.find(key)
            if twin is None and fresh:  # a stream: only now is it known what it is
                fresh()
        except UsageError:
            store.forget(batch)
            raise
    if twin and twin.id != batch:  # a stream that was here before
        store.forget(batch)
        return _again(store, twin, how)
    return _in_time(store, Submitted(store.seal(batch, key), continued=known is not None))


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


def _store_lines(store: Store, batch: int, source: Source, how: Submission, processes: int | None,
                 progress: Callable[[int], None] | None) -> None:  # fmt: skip
    stored = store.last_line(batch)
    reading = Reading(batch, how.model_id, how.priority or 0, how.reuse, how.defaults)
    fresh = (new for item in source.chunks() if (new := _after(item, stored)))
    rows, texts, texts_bytes = list[Row](), list[tuple[int, bytes]](), 0
    most_lines = min(FIRST_GROUP_LINES, GROUP_LINES)
    for item, found in parsed(fresh, reading, processes):
        if how.strict:
            _refuse_bad(found, source.name)
        rows += found
        if isinstance(item, Chunk):
            texts += blocks(item, batch)
            texts_bytes += len(item.data)
        if len(rows) >= most_lines or texts_bytes >= GROUP_BYTES:
            _add(store, batch, rows, texts, progress)
            rows, texts, texts_bytes, most_lines = [], [], 0, min(GROUP_LINES, 4 * most_lines)
    _add(store, batch, rows, texts, progress)


def _add(store: Store, batch: int, rows: list[Row], texts: list[tuple[int, bytes]],
         progress: Callable[[int], None] | None) -> None:  # fmt: skip
    store.add(batch, rows, texts)
    if progress and rows:
        progress(rows[-1][-1] & MOST_LINES)


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
