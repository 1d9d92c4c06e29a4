"""The latest batches of a model for a report: their prompt tokens, and their answers by finish reason.

Finish reasons are read from the stored answers, so they cover earlier runs, batches of a gateway and reused answers.
"""

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tokenmill.jobs.models import Batch
from tokenmill.jobs.openai.answers import finish_reason_of
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.report.report import BatchReuse

MAX_BATCHES = 12
MAX_READ_ANSWERS = 100_000  # of all shown batches, the newest first, so that a report of large batches is quick
_PAGE = 512
FinishReasons = Mapping[str, Mapping[str, int]]
"""Answers by finish reason, by the name of their batch; without the batches that were not read."""


def read_batches(address: Address, model_id: str | None) -> tuple[tuple[Batch, ...], FinishReasons]:
    """The latest batches that computed answers, of a model or of all models, and their finish reasons."""
    if not has_batches(address):
        return (), {}
    with StoreReader(address) as reader:
        found = [
            batch for batch in reader.batches() if batch.totals.prompt_tokens and model_id in (None, batch.model_id)
        ]
        shown = tuple(found[-MAX_BATCHES:])
        reasons = dict[str, Counter[str]]()
        left = MAX_READ_ANSWERS
        for batch in reversed(shown):
            left -= batch.counts.done
            if left >= 0:
                reasons[batch.name] = _finish_reasons(reader, batch)
    return shown, reasons


def batch_reuse(batch: Batch, finish_reasons: Mapping[str, int] | None) -> BatchReuse:
    """The figures of one batch."""
    totals = batch.totals
    return BatchReuse(
        batch.name,
        Path(batch.source).name,
        datetime.fromtimestamp(batch.created_s, UTC).isoformat(timespec="seconds"),
        batch.counts.total,
        totals.computed,
        totals.reused,
        totals.prompt_tokens - totals.cached_tokens,
        totals.cached_tokens,
        totals.completion_tokens,
        finish_reasons,
    )


def _finish_reasons(reader: StoreReader, batch: Batch) -> Counter[str]:
    """The intact answers of a batch by OpenAI's finish reason."""
    found = Counter[str]()
    number = 0
    while page := reader.results(batch.id, number, _PAGE):
        number = page[-1].number
        found.update(finish_reason_of(json.loads(result.body)) for result in page if result.body is not None)
    return found
