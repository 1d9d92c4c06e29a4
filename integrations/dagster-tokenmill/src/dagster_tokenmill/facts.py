"""Metadata of a materialisation: tokens, reuse, speed, cost and links of its batches. Pure."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

from dagster_tokenmill.runner import RunBatch
from tokenmill.recipes import End, Origin

PATH = "table"  # "path" is the IO manager's
"""Metadata key of the written file, by which checks find it."""
_MAX_LINKS = 5  # batches with a link


def facts_of(
    run_batches: Sequence[RunBatch],
    origin: Origin,
    *,
    end: End,
    page: str,
    batch_url: Callable[[str], str],
    cost_per_hour: float | None,
    currency: str,
) -> dict[str, dg.MetadataValue]:
    """The figures of whole batches, even if several runs waited for them."""
    batches = [one.batch for one in run_batches]
    prompt = sum(batch.usage.prompt_tokens for batch in batches)
    cached = sum(batch.usage.cached_tokens for batch in batches)
    generated = sum(batch.usage.completion_tokens for batch in batches)
    times = [batch.seconds for batch in batches]
    # The gateway reports whole seconds: a batch of less than one second has no speed.
    seconds = sum(time for time in times if time is not None)
    facts: dict[str, dg.MetadataValue] = {
        "end": dg.MetadataValue.text(end),
        "lines": dg.MetadataValue.int(sum(batch.total for batch in batches)),
        "answers": dg.MetadataValue.int(sum(batch.completed for batch in batches)),
        "lines without an answer": dg.MetadataValue.int(sum(batch.failed for batch in batches)),
        "prompt tokens": dg.MetadataValue.int(prompt),
        "cached tokens": dg.MetadataValue.int(cached),
        "generated tokens": dg.MetadataValue.int(generated),
        "seconds": dg.MetadataValue.int(seconds),
    }
    if prompt:
        facts["reuse %"] = dg.MetadataValue.float(round(100 * cached / prompt, 1))
    if seconds:
        facts["generated tok/s"] = dg.MetadataValue.float(round(generated / seconds, 2))
    if cost_per_hour is not None:
        facts[f"cost {currency}"] = dg.MetadataValue.float(round(seconds / 3600 * cost_per_hour, 6))
    facts |= {
        "batches": dg.MetadataValue.json([batch.id for batch in batches]),
        "re-attached": dg.MetadataValue.json([one.batch.id for one in run_batches if one.attached]),
        "page": dg.MetadataValue.url(page),
        "model": dg.MetadataValue.text(origin.model),
        "engine": dg.MetadataValue.text(origin.engine),
        "build": dg.MetadataValue.text(origin.build),
    }
    for number, one in enumerate(run_batches[-_MAX_LINKS:]):
        facts["batch" if number == 0 else f"batch {number + 1}"] = dg.MetadataValue.url(batch_url(one.batch.id))
    return facts


def file_facts(path: Path, rows: int) -> dict[str, dg.MetadataValue]:
    """The written file and its number of rows."""
    return {PATH: dg.MetadataValue.path(str(path)), "dagster/row_count": dg.MetadataValue.int(rows)}
