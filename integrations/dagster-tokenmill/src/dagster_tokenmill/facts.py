"""What a materialisation says of the work behind it. Pure: batches in, metadata of Dagster out."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

from dagster_tokenmill.mill import Worked
from tokenmill.recipes import End, Origin

PATH = "table"  # "path" is the IO manager's
"""Under which the written file is named; checks find it there."""
_LINKED = 5  # batches with a link of their own


def facts_of(
    worked: Sequence[Worked],
    origin: Origin,
    *,
    end: End,
    page: str,
    batch_url: Callable[[str], str],
    cost_per_hour: float | None,
    currency: str,
) -> dict[str, dg.MetadataValue]:
    """Tokens, reuse, speed, cost, links. They are those of whole batches, however many runs have waited for them."""
    batches = [one.batch for one in worked]
    prompt = sum(batch.usage.prompt_tokens for batch in batches)
    cached = sum(batch.usage.cached_tokens for batch in batches)
    generated = sum(batch.usage.completion_tokens for batch in batches)
    times = [batch.seconds for batch in batches]
    # whole seconds are told: a batch of less than one has no speed
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
        "re-attached": dg.MetadataValue.json([one.batch.id for one in worked if one.attached]),
        "page": dg.MetadataValue.url(page),
        "model": dg.MetadataValue.text(origin.model),
        "engine": dg.MetadataValue.text(origin.engine),
        "build": dg.MetadataValue.text(origin.build),
    }
    for number, one in enumerate(worked[-_LINKED:]):
        facts["batch" if number == 0 else f"batch {number + 1}"] = dg.MetadataValue.url(batch_url(one.batch.id))
    return facts


def written(path: Path, rows: int) -> dict[str, dg.MetadataValue]:
    """The file, and how many rows it has."""
    return {PATH: dg.MetadataValue.path(str(path)), "dagster/row_count": dg.MetadataValue.int(rows)}
