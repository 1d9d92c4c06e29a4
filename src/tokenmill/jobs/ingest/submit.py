"""Store a job file: read it, check each line, store the lines in groups, seal the batch.

The same file with the same model, output and defaults is the same batch: submitting it again continues after the last
line that is stored. A file that is refused leaves no batch behind. `submit` returns when the batch is sealed;
`ingest.Ingest` takes the same steps in the background while the first jobs are worked on.
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

GROUP_LINES = 65_536  # per transaction; a transaction rewrites every index page that one of its lines falls into
FIRST_GROUP_LINES = 4096  # small, so that the first jobs can be started early
GROUP_BYTES = 64 * MIB
_SHOWN = 3
_LOOK_S = 0.5  # between two looks at a batch that another process stores
_MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch that is stored, or being stored."""

    batch: Batch
    continued: bool  # the batch was there before
    changed: Rescheduled | None = None  # its deadline or priority; None: neither


Steps = Generator[Submitted | None, None, Submitted]
"""Stores a file group by group and returns the sealed batch.

Yields the batch after each group whose jobs may be started, and None where they may not be started yet.
"""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a submission, called in the thread that stores the lines."""

    progress: Callable[[int], None] | None = None  # gets the number of the last line that is stored
    tell: Callable[[str], None] | None = None  # gets a message while another process stores the same batch


def submit(
    store: Store,
    where: str | Path,
    how: Submission,
    *,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
    called: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Submitted:
    """Store the jobs of a file and return the sealed batch; the callbacks are those of `Hooks`.

    `called` replaces the file name as the source of the batch. If another process is storing the same batch, this waits
    for it, and takes over if that process is lost. A finished batch that was computed without reuse is computed anew
    when it is submitted again. A deadline or a priority also applies to a batch that was there before.
    """
    submission = FileSubmission(store, where, how, processes, called, Hooks(progress, tell))
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
    """One submission; after a conflict or a crash of the server it restarts from the lines that are stored."""

    store: Store
    where: str | Path
    how: Submission
    processes: int | None = None
    called: str | None = None
    hooks: Hooks = field(default_factory=Hooks)
    _begun: int | None = None  # the batch that was begun here
    _storing: int | None = None  # the batch whose lines are being stored
    _waited: bool = False  # for another process to store the batch
    _hashed: Hashed | None = None

    def find(self) -> Batch | None:
        """The batch that an earlier submission of the same file made, unless it will be computed anew.

        None for a new file, and for a stream: only its end tells which batch it is.
        """
        self._hashed = hash_file(self.where)
        if self._hashed is None:
            return None
        known = self.store.find(batch_key(self.how, self._hashed.digest))
        return None if known is not None and known.finished and not self.how.reuse else known

    def steps(self) -> Steps:
        """Store the file; UsageError refuses it, and the caller must then call `forget_refused`."""
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
        """Remove the batch of a refused file. None of its jobs may be in flight."""
        if self._storing is not None:
            self.store.submissions.forget(self._storing)
            self._storing = None

    def _file(self, source: Source, key: bytes) -> Steps:
        """A file that can be read again; its digest identifies the batch before a line is stored."""
        store = self.store
        how = self.how
        known = self.store.find(key)
        anew = known is not None and known.finished and not how.reuse and not self._waited
        if known and how.strict:
            _refuse_known_bad(store, known)
        if known and known.sealed_s is not None and not anew:
            return _again(store, known, how)
        if known and (who := store.submissions.storing(known.id)):
            raise BeingStored(f"{who} is storing the lines of this batch", hint="the same command finds it")
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
        """A stream, read once; only its end tells which batch it is, so no job starts before that."""
        store = self.store
        batch = self._begin(source, None)
        last, jobs = yield from self._store_lines(batch, source, None)
        key = batch_key(self.how, source.digest or "")
        if store.find(key) is None:
            check_unused(self.how)
        self._storing = None
        while True:
            yield from self._wait(key)
            if (twin := store.find(key)) and twin.sealed_s is not None:  # it was here before
                store.submissions.forget(batch)
                return _again(store, twin, self.how)
            if twin:  # half of it, from a process that is gone; here is all of it
                store.submissions.retire(twin.id)
            try:
                return in_time(
                    store, Submitted(store.submissions.seal(batch, key, last=last, jobs=jobs), continued=False)
                )
            except StoreInUse:  # another has just begun the same
                continue

    def _begin(self, source: Source, key: bytes | None) -> int:
        self._begun = self.store.submissions.begin(self.how, source=self.called or source.name, key=key)
        return self._begun

    def _wait(self, key: bytes) -> Generator[None, None, None]:
        """Until no other process stores the batch any more: it is sealed, or that process is lost."""
        said = False
        while (
            (batch := self.store.find(key))
            and batch.sealed_s is None
            and (who := self.store.submissions.storing(batch.id))
        ):
            if self.hooks.tell and not said:
                self.hooks.tell(f"{who} is storing the same jobs; waiting for it")
            said = self._waited = True
            self.store.renew_lease()
            time.sleep(_LOOK_S)
            yield

    def _store_lines(
        self, batch: int, source: Source, continued: bool | None
    ) -> Generator[Submitted | None, None, tuple[int, int]]:
        """Store the lines that are not stored yet; the number of the last line, and of all jobs of the batch.

        Yields after each group: None if `continued` is None, which keeps jobs from being started.
        """
        store = self.store
        how = self.how
        self._storing = batch
        known = store.batch(batch)
        last = store.submissions.last_line(batch)
        jobs = known.counts.total
        reading = ParseOptions(batch, how.model_id, known.priority, how.reuse, how.defaults)
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
    """A batch that was there before, with what the submission says of its order."""
    changed = reschedule(store, batch, how)
    found = Submitted(changed.batch, continued=True, changed=changed if changed.deadline or changed.priority else None)
    return in_time(store, found)


def in_time(store: Store, found: Submitted) -> Submitted:
    """The same after jobs whose deadline has passed have failed: no engine should be loaded for them."""
    if found.batch.finished or not store.expire():
        return found
    return replace(found, batch=store.batch(found.batch.id))


def batch_key(how: Submission, digest: str) -> bytes:
    """What makes two submissions the same batch."""
    parts = [how.model_id, how.output, how.errors, how.reuse, dict(how.defaults), digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _groups(
    items: Iterable[tuple[Chunk | BadLine, list[JobRow]]], batch: int
) -> Iterator[tuple[list[JobRow], list[tuple[int, bytes]]]]:
    """Rows and blocks of text that are stored together; blank lines alone make none."""
    rows = list[JobRow]()
    texts = list[tuple[int, bytes]]()
    texts_bytes = 0
    most_lines = min(FIRST_GROUP_LINES, GROUP_LINES)
    for item, found in items:
        rows += found
        if isinstance(item, Chunk):
            texts += blocks(item, batch)
            texts_bytes += len(item.data)
        if rows and (len(rows) >= most_lines or texts_bytes >= GROUP_BYTES):
            yield rows, texts
            rows = []
            texts = []
            texts_bytes = 0
            most_lines = min(GROUP_LINES, 4 * most_lines)
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


def _refuse_bad(rows: Sequence[JobRow], name: str) -> None:
    _refuse([(JobId.line(row[-1]), row[9]) for row in rows if row[0] == State.FAILED], name)


def _refuse_known_bad(store: Store, batch: Batch) -> None:
    """The same for a batch that was submitted before without being strict."""
    after = 0
    while page := store.failures(batch.id, after, 1000):
        _refuse([(item.number, item.message) for item in page if item.code == INVALID_LINE], batch.source)
        after = page[-1].number


def _refuse(bad: Sequence[tuple[int, str | None]], name: str) -> None:
    if bad:
        shown = "; ".join(f"line {number}: {reason}" for number, reason in bad[:_SHOWN])
        raise UsageError(
            f"{name} has lines that cannot be run: {shown}",
            hint="mend them, or leave --strict out: they become error lines, the rest runs",
        )
