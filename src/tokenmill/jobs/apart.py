"""Whether a batch shares so little that its engine does better when every lane has cells of its own.

Sequences that share a cache share heads, and pay for it: prompts lie in pieces between those of others. Where lanes are
apart, each has what its own last prompt began with, or a copy of what another has then, and no more. What is computed
again is held against what is gained:

    loses   shared tokens / (prompt tokens + answer tokens): too high, because a token of an answer costs more
    gains   GAIN of the time

Both sides are of one batch. Only engines that change their context while they run can be set so, and only one that
works for this batch alone should be: no lane is left over for interactive requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError, RequestRefused, UsageError
from tokenmill.jobs import life
from tokenmill.jobs.forest import Minimum, Pending, common_length, minimum_bytes
from tokenmill.jobs.identity import head_of
from tokenmill.jobs.job import Batch, Waiting
from tokenmill.jobs.line import call_of
from tokenmill.jobs.reader import Reader

GAIN = 0.04  # of the time: measured on processors, 4 to 16 lanes, answers of 64 tokens; with 24 it was 0.08
MOST_SHARED = 0.75 * GAIN
MOST_ROWS, PAGE_ROWS = 65_536, 4096  # jobs whose places are looked at; places are checksums, so the first are as any
SAMPLE = 48  # jobs whose tokens are compared: heads shorter than a chunk, and what a template puts before all
LANE_HEAD = 64  # tokens: so short a head of all jobs is no loss, because every lane goes on with what it has of it
MOST_ANSWER = 32  # tokens that an answer counts as: a ceiling is seldom reached
WORTH = 4  # times the lanes that a batch must have jobs for


@runtime_checkable
class Parts(Engine, Protocol):
    """An engine that can give each lane cells of its own."""

    @property
    def streams(self) -> bool:
        """Whether they have."""

    async def set_context(self, **changes: object) -> object:
        """Build another context: with `streams` or without."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the jobs of a batch have in common, on average of a job."""

    prompt_tokens: float
    shared_tokens: float  # that need not be computed where heads are shared, beyond what every lane has anyway
    answer_tokens: float

    @property
    def share(self) -> float:
        """Of the work, what sharing saves."""
        work = self.prompt_tokens + self.answer_tokens
        return self.shared_tokens / work if work else 0.0


async def set_apart(engine: Engine, store: Reader, batch: Batch) -> str | None:
    """Give every lane cells of its own where a batch gains by it, and one cache to all where it does not.

    What was done, in words; None: the engine is as it was. The lanes stay as many as they are, so their number is
    chosen before: it is measured with shared heads.
    """
    now = life.of(engine)
    if not isinstance(now, Parts) or not now.capabilities.changes_context:
        return None
    found = await sharing(now, store, batch)
    wanted = found is not None and pays(found, batch.counts.pending, now.identity.lanes or 1)
    if found is None or wanted == now.streams:
        return None
    try:
        await now.set_context(streams=wanted)
    except (EngineError, UsageError):  # not with this model, or too few cells: nothing has changed
        return None
    if wanted:
        return f"each lane has cells of its own: sharing heads would save {found.share:.1%} of the work, and costs more"
    return f"all lanes share their cells again: shared heads save {found.share:.1%} of the work"


def pays(found: Sharing, jobs: int, lanes: int) -> bool:
    """Whether so many jobs are done sooner when lanes are apart."""
    return lanes > 1 and jobs >= WORTH * lanes and found.share <= MOST_SHARED


async def sharing(engine: Engine, store: Reader, batch: Batch) -> Sharing | None:
    """What the pending jobs of a batch have in common; None: too few of them can be read to tell."""
    rows = _rows(store, batch)
    total = sum(row.prompt_bytes for row in rows)
    long_heads = 1 - minimum_bytes(map(_pending, rows)) / total if total else 0.0
    tokens, answers, count = Minimum(), 0, 0
    first: tuple[int, ...] = ()
    begins = LANE_HEAD + 1  # tokens that all begin with
    for row in rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]:
        job = store.job(row.id)
        try:
            if job is not None:
                prompt = await engine.tokenize(call_of(job.line, batch.defaults).prompt)
                tokens.add(prompt)
                first = first or prompt
                begins = min(begins, common_length(first[:-1], prompt))
                answers += MOST_ANSWER if row.max_tokens is None else min(MOST_ANSWER, row.max_tokens)
                count += 1
        except (RequestRefused, EngineError, ValueError):  # the work will say so
            continue
    if count < 2:
        return None
    mean = tokens.units / count
    shared = max((tokens.units - tokens.least) / (count - 1), long_heads * mean)
    return Sharing(mean, max(0.0, shared - (begins if begins <= LANE_HEAD else 0)), answers / count)


def _rows(store: Reader, batch: Batch) -> Sequence[Waiting]:
    """Pending jobs by place, so that those with one head are neighbours."""
    rows: list[Waiting] = []
    while len(rows) < MOST_ROWS:
        page = store.waiting([batch.id], after=rows[-1].key if rows else None, limit=PAGE_ROWS)
        rows += page
        if len(page) < PAGE_ROWS:
            break
    return rows


def _pending(row: Waiting) -> Pending:
    return Pending(row.id, head_of(row.place), row.prompt_bytes)
