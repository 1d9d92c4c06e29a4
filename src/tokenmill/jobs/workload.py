"""A stored batch as a `Workload`: samples of its pending jobs, and the prefixes that their prompts share.

`describe` reads only what the engine's slots and KV layout depend on; `tokenmill.tuner.slots` makes the decision.
"""

from collections.abc import AsyncIterator, Iterator, Sequence

from tokenmill.engine.engine import Engine, Request
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.jobs.ingest.identity import stored_prefix_key
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.models import Batch, QueuedJob
from tokenmill.jobs.scheduler.prefix_groups import Minimum, Pending, common_length, minimum_bytes
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.tuner.slots import PrefixSharing, Workload, changes_layout, measurable_slots, worth_measuring

ASSUMED_OUTPUT_TOKENS = 32  # for a job without max_tokens
MAX_OUTPUT_TOKENS = 32  # assumed at most per answer when comparing prefixes, because answers rarely reach max_tokens
MAX_ROWS = 65_536  # jobs whose places are compared; places are checksums, so the first ones are a fair sample
PAGE_ROWS = 4096
SAMPLE = 48  # jobs that are tokenized, to find prefixes that are shorter than a chunk or come from chat templates
SLOT_PREFIX_TOKENS = 64  # every slot keeps its own copy of a prefix of all prompts up to this length


async def describe(engine: Engine, store: StoreReader, batch: Batch, *, measure: bool, adapt_layout: bool) -> Workload:
    """The workload of a batch's pending jobs.

    Requests to measure with are read only if `measure` is set, the engine's slots can be measured and the batch is long
    enough; prompts are tokenized only if `adapt_layout` is set and the engine can change its KV layout.
    """
    output_tokens = 0.0
    requests: tuple[Request, ...] = ()
    limit = measurable_slots(engine) if measure else None
    if limit is not None:
        rows = store.waiting([batch.id], limit=2 * limit)  # more than needed: the engine may refuse some
        output_tokens = batch.counts.pending * _mean_output_tokens(rows)
        if worth_measuring(output_tokens, limit):
            requests = tuple(_requests(store, batch, rows))
    sharing = await prefix_sharing(engine, store, batch) if adapt_layout and changes_layout(engine) else None
    return Workload(batch.counts.pending, output_tokens, requests, sharing)


def _mean_output_tokens(rows: Sequence[QueuedJob]) -> float:
    limits = [ASSUMED_OUTPUT_TOKENS if row.max_tokens is None else row.max_tokens for row in rows]
    return sum(limits) / len(limits) if limits else 0.0


def _requests(store: StoreReader, batch: Batch, rows: Sequence[QueuedJob]) -> Iterator[Request]:
    for row in rows:
        job = store.job(row.id)
        try:
            if job is not None:
                yield call_of(job.line, batch.defaults).request("batch")
        except (RequestRefused, ValueError):  # accepted by an older version; the worker reports the error
            continue


async def prefix_sharing(engine: Engine, store: StoreReader, batch: Batch) -> PrefixSharing | None:
    """Prefixes shared by a batch's pending jobs; None if fewer than two of the sampled jobs can be read."""
    rows = pending_rows(store, batch)
    sample = rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]
    prompts: list[tuple[int, ...]] = []
    output_tokens = 0
    async for row, prompt in _tokenized(engine, store, batch, sample):
        prompts.append(prompt)
        output_tokens += MAX_OUTPUT_TOKENS if row.max_tokens is None else min(MAX_OUTPUT_TOKENS, row.max_tokens)
    if len(prompts) < 2:
        return None
    minimum = Minimum()
    for prompt in prompts:
        minimum.add(prompt)
    mean = minimum.units / len(prompts)
    shared_in_sample = (minimum.units - minimum.computed) / (len(prompts) - 1)
    shared = max(shared_in_sample, _shared_part(rows) * mean)
    common = min(common_length(prompts[0][:-1], prompt) for prompt in prompts)
    kept_by_slots = common if common <= SLOT_PREFIX_TOKENS else 0
    return PrefixSharing(mean, max(0.0, shared - kept_by_slots), output_tokens / len(prompts))


async def _tokenized(
    engine: Engine, store: StoreReader, batch: Batch, rows: Sequence[QueuedJob]
) -> AsyncIterator[tuple[QueuedJob, tuple[int, ...]]]:
    for row in rows:
        job = store.job(row.id)
        if job is None:
            continue
        try:
            prompt = await engine.tokenize(call_of(job.line, batch.defaults).prompt)
        except (RequestRefused, EngineError, ValueError):  # the worker reports the error
            continue
        yield row, prompt


def _shared_part(rows: Sequence[QueuedJob]) -> float:
    """Share of all prompt bytes that is saved by reusing prefixes in whole chunks."""
    total = sum(row.prompt_bytes for row in rows)
    pending = (Pending(row.id, stored_prefix_key(row.place), row.prompt_bytes) for row in rows)
    return 1 - minimum_bytes(pending) / total if total else 0.0


def pending_rows(store: StoreReader, batch: Batch) -> Sequence[QueuedJob]:
    """Pending jobs by place, so that jobs with a common prefix are adjacent."""
    rows: list[QueuedJob] = []
    while len(rows) < MAX_ROWS:
        page = store.waiting([batch.id], after=rows[-1].key if rows else None, limit=PAGE_ROWS)
        rows += page
        if len(page) < PAGE_ROWS:
            break
    return rows
