"""What a store knows of a recipe that is about to run: lines that have their outcome, and how long answers were.

Reads only, and only as much as a forecast is worth.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenmill.jobs.line import ParseOptions, row
from tokenmill.jobs.models import Batch, JobId, State, Submission
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.submit import batch_key
from tokenmill.recipes.runner import Answered, Line, line_bytes

MOST_LINES = 100_000  # of a stage that are looked up one by one; of more, a sample stands for all
MOST_ANSWERS = 400  # that a mean is taken from: the newest
FEWEST_ANSWERS = 8  # of a stage; with fewer, all of the model count
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long answers were, against what they might have been."""

    share: float  # of max_tokens, on average
    answers: int  # that it rests on
    alike: bool  # of the same stage; else of any batch of the model


def settled_lines(reader: StoreReader, model_id: str, lines: Sequence[Line]) -> frozenset[int]:
    """Which of these lines, from 0, cost nothing any more.

    A line is answered when its request is, in whichever batch; where all of them are a batch of the store, a failure
    there is an outcome as well.
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
    """The answer to a line that is in the store; None: there is none."""
    identity = _identity(model_id, line)
    body = None if identity is None else reader.answer_to(identity)
    return None if body is None else Answered(str(line.get("custom_id")), json.loads(body))


def _identity(model_id: str, line: Line) -> bytes | None:
    """As `submit` reckons it; None: the line cannot be run."""
    return row(line_bytes(line).decode().removesuffix("\n"), 1, ParseOptions(0, model_id)).identity


def _states(reader: StoreReader, batch: Batch) -> Iterator[tuple[int, State]]:
    after = 0
    while page := reader.results(batch.id, after, _PAGE):
        yield from ((result.number, result.state) for result in page)
        after = page[-1].number


def lengths(reader: StoreReader, model_id: str, stages: Iterable[str]) -> dict[str, Lengths]:
    """How long answers of each stage are likely to be: as those of the same stage were, or as all of the model."""
    batches = [batch for batch in reversed(reader.batches()) if batch.model_id == model_id and batch.counts.done]
    overall = _mean(reader, batches, alike=False)
    found = {}
    for stage in stages:
        same = [batch for batch in batches if batch.source.endswith(f": {stage}")]
        own = _mean(reader, same, alike=True)
        chosen = own if own is not None and own.answers >= FEWEST_ANSWERS else overall
        if chosen is not None:
            found[stage] = chosen
    return found


def _mean(reader: StoreReader, batches: Iterable[Batch], *, alike: bool) -> Lengths | None:
    pairs = list(islice((pair for batch in batches for pair in _answers(reader, batch)), MOST_ANSWERS))
    most = sum(most for _, most in pairs)
    return Lengths(sum(tokens for tokens, _ in pairs) / most, len(pairs), alike) if most else None


def _answers(reader: StoreReader, batch: Batch) -> Iterator[tuple[int, int]]:
    """Tokens that were written, and that might have been."""
    for result in reader.results(batch.id, 0, _PAGE):
        job = reader.job(JobId.of(batch.id, result.number)) if result.body is not None else None
        if job is None or result.body is None or not job.max_tokens:
            continue
        tokens = json.loads(result.body).get("usage", {}).get("completion_tokens")
        if isinstance(tokens, int):
            yield tokens, job.max_tokens
