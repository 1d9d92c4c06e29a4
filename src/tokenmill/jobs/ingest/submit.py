"""Stores a job file: reads it, checks each line, stores the lines in groups, and seals the batch.

The same file with the same model, output and defaults is the same batch: submitting it again continues after the last
stored line. A refused file leaves no batch behind. `submit` returns when the batch is sealed; `background.Ingest`
performs the same steps in the background while the first jobs run.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from tokenmill.errors import StoreInUse, UsageError
from tokenmill.jobs.ingest.job_file import open_jobs
from tokenmill.jobs.ingest.line import JobRow, ParseOptions, blocks
from tokenmill.jobs.ingest.parsing import parsed
from tokenmill.jobs.ingest.reschedule import Rescheduled, reschedule
from tokenmill.jobs.models import INVALID_LINE, Batch, JobId, State, Submission
from tokenmill.jobs.output_checks import check_unused
from tokenmill.jobs.sharding.coordination import BeingStored, LinesLost
from tokenmill.jobs.store.store import Store
from tokenmill.storage.lines import BadLine, Chunk, Hashed, Source, hash_file
from tokenmill.units import MIB

GROUP_LINES = 65_536  # per transaction; large, because every transaction rewrites most index pages
FIRST_GROUP_LINES = 4096  # small, so that the first jobs can start early
GROUP_BYTES = 64 * MIB
_SHOWN = 3
_POLL_S = 0.5  # while another process stores the batch
_MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch that is stored or being stored."""

    batch: Batch
    continued: bool  # the batch existed before
    changed: Rescheduled | None = None  # its new deadline or priority; None: unchanged


Steps = Generator[Submitted | None, None, Submitted]
"""Stores a file in groups of lines and returns the sealed batch.

Yields the batch after each group if its jobs may start, otherwise None.
"""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a submission, called from the thread that stores the lines."""

    progress: Callable[[int], None] | None = None  # receives the number of the last stored line
    on_wait: Callable[[str], None] | None = None  # receives a message when waiting for another process


def submit(
    store: Store,
    where: str | Path,
    how: Submission,
    *,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
    source_name: str | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Submitted:
    """Store the jobs of a file and return the sealed batch; the callbacks are those of `Hooks`.

    `source_name` replaces the file name as the source of the batch. If another process is storing the same batch, this
    waits for it, and takes over if that process dies. A finished batch that was computed without reuse is computed
    again when it is submitted again. A deadline or priority is also applied to an existing batch.
    """
    submission = FileSubmission(store, where, how, processes, source_name, Hooks(progress, on_wait))
    steps = submission.steps()
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        submitted: Submitted = ended.value
        return submitted
    except UsageError:
        submission.forget_refused()
        raise


@dataclass(slots=True)
class FileSubmission:
    """A submission; after a conflict or a crash of the server it continues after the last stored line."""

    store: Store
    where: str | Path
    how: Submission
    processes: int | None = None
    source_name: str | None = None
    hooks: Hooks = field(default_factory=Hooks)
    _begun: int | None = None  # the batch that was created by this submission
    _storing: int | None = None  # the batch whose lines are being stored
    _waited: bool = False  # for another process to store the batch
    _hashed: Hashed | None = None

    def find(self) -> Batch | None:
        """The batch of an earlier submission of the same file, unless it will be computed again.

        None for a new file, and for a stream, whose batch is known only at its end.
        """
        self._hashed = hash_file(self.where)
        if self._hashed is None:
            return None
        known = self.store.find(batch_key(self.how, self._hashed.digest))
        return None if known is not None and known.finished and not self.how.reuse else known

    def steps(self) -> Steps:
        """Store the file. If this raises UsageError, the file is refused and the caller must call `forget_refused`."""
        for tries in count(1):
            self._storing = None
            with open_jobs(self.where, self._hashed) as source:
                if source.digest is None:
                    return (yield from self._stream(source))
                key = batch_key(self.how, source.digest)
                try:
                    return (yield from self._file(source, key))
                except BeingStored:
                    yield from self._wait(key)
                except LinesLost:
                    if tries >= _MAX_TRIES:
                        raise
        raise AssertionError("unreachable")

    def forget_refused(self) -> None:
        """Remove the batch of a refused file; none of its jobs may be in flight."""
        if self._storing is not None:
            self.store.submissions.forget(self._storing)
            self._storing = None

    def _file(self, source: Source, key: bytes) -> Steps:
        """Store a regular file, whose digest identifies the batch before any line is stored."""
        store = self.store
        how = self.how
        known = self.store.find(key)
        anew = known is not None and known.finished and not how.reuse and not self._waited
        if known and how.strict:
            _refuse_known_bad(store, known)
        if known and known.sealed_s is not None and not anew:
            return _again(store, known, how)
        if known and (who := store.submissions.storing(known.id)):
            raise BeingStored(f"{who} is storing the lines of this batch", hint="run the same command again later")
        check_unused(how)
        if known and anew:
            store.submissions.retire(known.id)
            known = None
        if known:
            reschedule(store, known, how)
        batch = known.id if known else self._begin(source, key)
        continued = batch != self._begun
        last, jobs = yield from self._store_lines(batch, source, None if how.strict else continued)
        self._storing = None
        return in_time(store, Submitted(store.submissions.seal(batch, key, last=last, jobs=jobs), continued))

    def _stream(self, source: Source) -> Steps:
        """Store a stream, which can be read once. Its batch is known only at its end, so no job starts before."""
        store = self.store
        batch = self._begin(source, None)
        last, jobs = yield from self._store_lines(batch, source, None)
        key = batch_key(self.how, source.digest or "")
        if store.find(key) is None:
            check_unused(self.how)
        self._storing = None
        while True:
            yield from self._wait(key)
            if (twin := store.find(key)) and twin.sealed_s is not None:  # the batch exists
                store.submissions.forget(batch)
                return _again(store, twin, self.how)
            if twin:  # incomplete, from a process that died; this one is complete
                store.submissions.retire(twin.id)
            try:
                return in_time(
                    store, Submitted(store.submissions.seal(batch, key, last=last, jobs=jobs), continued=False)
                )
            except StoreInUse:  # another process has just begun the same batch
                continue

    def _begin(self, source: Source, key: bytes | None) -> int:
        self._begun = self.store.submissions.begin(self.how, source=self.source_name or source.name, key=key)
        return self._begun

    def _wait(self, key: bytes) -> Generator[None, None, None]:
        """Wait until no other process stores the batch: it is sealed, or that process has died."""
        reported = False
        while (
            (batch := self.store.find(key))
            and batch.sealed_s is None
            and (who := self.store.submissions.storing(batch.id))
        ):
            if self.hooks.on_wait and not reported:
                self.hooks.on_wait(f"{who} is storing the same jobs; waiting for it")
            reported = self._waited = True
            self.store.renew_lease()
            time.sleep(_POLL_S)
            yield

    def _store_lines(
        self, batch: int, source: Source, continued: bool | None
    ) -> Generator[Submitted | None, None, tuple[int, int]]:
        """Store the lines that are not stored yet; returns the number of the last line and the number of all jobs.

        Yields after each group: the batch, or None if `continued` is None, so that no jobs start.
        """
        store = self.store
        how = self.how
        self._storing = batch
        known = store.batch(batch)
        last = store.submissions.last_line(batch)
        jobs = known.counts.total
        reading = ParseOptions(batch, how.model_id, known.priority, how.reuse, how.defaults, how.owner)
        lines = (new for item in source.chunks() if (new := _after(item, last)))
        for rows, texts in _groups(parsed(lines, reading, self.processes), batch):
            if how.strict:
                _refuse_bad(rows, source.name)
            store.submissions.add(batch, rows, texts, after=last)
            last = JobId.line(rows[-1][-1])
            jobs = jobs + len(rows)
            if self.hooks.progress:
                self.hooks.progress(last)
            yield None if continued is None else Submitted(store.batch(batch), continued)
        return last, jobs


def _again(store: Store, batch: Batch, how: Submission) -> Submitted:
    """An existing batch, with the deadline and priority of the submission applied."""
    changed = reschedule(store, batch, how)
    found = Submitted(changed.batch, continued=True, changed=changed if changed.deadline or changed.priority else None)
    return in_time(store, found)


def in_time(store: Store, found: Submitted) -> Submitted:
    """Fail jobs whose deadline has passed, so that no engine is loaded for them; returns the updated batch."""
    if found.batch.finished or not store.expire():
        return found
    return replace(found, batch=store.batch(found.batch.id))


def batch_key(how: Submission, digest: str) -> bytes:
    """The key that is equal for submissions of the same batch."""
    parts = [how.model_id, how.output, how.errors, how.reuse, dict(how.defaults), digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _groups(
    items: Iterable[tuple[Chunk | BadLine, list[JobRow]]], batch: int
) -> Iterator[tuple[list[JobRow], list[tuple[int, bytes]]]]:
    """Yield groups of rows and text blocks, each to be stored in one transaction; no group has only blank lines."""
    rows = list[JobRow]()
    texts = list[tuple[int, bytes]]()
    texts_bytes = 0
    max_lines = min(FIRST_GROUP_LINES, GROUP_LINES)
    for item, found in items:
        rows += found
        if isinstance(item, Chunk):
            texts += blocks(item, batch)
            texts_bytes += len(item.data)
        if rows and (len(rows) >= max_lines or texts_bytes >= GROUP_BYTES):
            yield rows, texts
            rows = []
            texts = []
            texts_bytes = 0
            max_lines = min(GROUP_LINES, 4 * max_lines)
    if rows:
        yield rows, texts


def _after(item: Chunk | BadLine, stored: int) -> Chunk | BadLine | None:
    """The part of a chunk after the stored lines; None if all of it is stored."""
    if isinstance(item, BadLine):
        return item if item.number > stored else None
    known = stored + 1 - item.first
    if known <= 0:
        return item
    rest = item.data.split(b"\n", known)[known:]
    return Chunk(stored + 1, rest[0]) if rest and rest[0] else None


def _refuse_bad(rows: Sequence[JobRow], name: str) -> None:
    _refuse([(JobId.line(row[-1]), row[9]) for row in rows if row[0] == State.FAILED], name)


def _refuse_known_bad(store: Store, batch: Batch) -> None:
    """Like `_refuse_bad`, for a batch that was stored without `strict`."""
    after = 0
    while page := store.failures(batch.id, after, 1000):
        _refuse([(item.number, item.message) for item in page if item.code == INVALID_LINE], batch.source)
        after = page[-1].number


def _refuse(bad: Sequence[tuple[int, str | None]], name: str) -> None:
    if bad:
        shown = "; ".join(f"line {number}: {reason}" for number, reason in bad[:_SHOWN])
        raise UsageError(
            f"{name} has lines that cannot be run: {shown}",
            hint="fix them, or omit --strict to run the other lines",
        )
