"""Reads from the store what the forecast of a recipe needs: which lines have an outcome, and lengths of answers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenmill.jobs.ingest.line import ParseOptions, row
from tokenmill.jobs.ingest.submit import batch_key
from tokenmill.jobs.models import Batch, JobId, State, Submission
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.recipes.runner import Answered, Line, line_bytes

MAX_LINES = 100_000  # lines looked up per stage; larger stages are sampled
MAX_ANSWERS = 400  # newest answers used for a mean
MIN_ANSWERS = 8  # minimum for a stage; otherwise all answers of the model count
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Lengths:
    """Length of answers relative to their maximum."""

    share: float  # mean share of max_tokens
    answers: int  # number of answers
    same_stage: bool  # False: from all batches of the model


def settled_lines(reader: StoreReader, model_id: str, lines: Sequence[Line]) -> frozenset[int]:
    """Indices of the lines that need no more work.

    A line is settled if any batch has an answer to its request. If the store has a batch of exactly these lines, its
    failed lines are settled, too.
    """
    digest = hashlib.sha256()
    settled = set[int]()
    for number, line in enumerate(lines):
        digest.update(line_bytes(line))
        identity = _identity(model_id, line)
        if identity is not None and reader.has_answer(identity):
            settled.add(number)
    batch = reader.find(batch_key(Submission(model_id), digest.hexdigest()))
    if batch is not None:
        settled.update(number - 1 for number, state in _states(reader, batch) if state.final)
    return frozenset(settled)


def stored_answer(reader: StoreReader, model_id: str, line: Line) -> Answered | None:
    """The stored answer to a line, or None."""
    identity = _identity(model_id, line)
    body = None if identity is None else reader.answer_to(identity)
    return None if body is None else Answered(str(line.get("custom_id")), json.loads(body))


def _identity(model_id: str, line: Line) -> bytes | None:
    """The request identity as `submit` computes it; None for an invalid line."""
    return row(line_bytes(line).decode().removesuffix("\n"), 1, ParseOptions(0, model_id)).identity


def _states(reader: StoreReader, batch: Batch) -> Iterator[tuple[int, State]]:
    after = 0
    while page := reader.results(batch.id, after, _PAGE):
        yield from ((result.number, result.state) for result in page)
        after = page[-1].number


def lengths(reader: StoreReader, model_id: str, stages: Iterable[str]) -> dict[str, Lengths]:
    """Expected answer lengths per stage, from the same stage or from all batches of the model."""
    batches = [batch for batch in reversed(reader.batches()) if batch.model_id == model_id and batch.counts.done]
    overall = _mean(reader, batches, same_stage=False)
    found = {}
    for stage in stages:
        same = [batch for batch in batches if batch.source.endswith(f": {stage}")]
        own = _mean(reader, same, same_stage=True)
        chosen = own if own is not None and own.answers >= MIN_ANSWERS else overall
        if chosen is not None:
            found[stage] = chosen
    return found


def _mean(reader: StoreReader, batches: Iterable[Batch], *, same_stage: bool) -> Lengths | None:
    pairs = list(islice((pair for batch in batches for pair in _answers(reader, batch)), MAX_ANSWERS))
    maximum = sum(max_tokens for _, max_tokens in pairs)
    return Lengths(sum(tokens for tokens, _ in pairs) / maximum, len(pairs), same_stage) if maximum else None


def _answers(reader: StoreReader, batch: Batch) -> Iterator[tuple[int, int]]:
    """Pairs of generated and maximum tokens."""
    for result in reader.results(batch.id, 0, _PAGE):
        job = reader.job(JobId.of(batch.id, result.number)) if result.body is not None else None
        if job is None or result.body is None or not job.max_tokens:
            continue
        tokens = json.loads(result.body).get("usage", {}).get("completion_tokens")
        if isinstance(tokens, int):
            yield tokens, job.max_tokens
