"""Pending jobs as rows of the store, made from the sizes of their prefixes."""

from collections.abc import Sequence

from tokenmill.jobs.ingest.identity import ENDS
from tokenmill.jobs.models import JobId, QueuedJob

OWN_BYTES = 40  # of each prompt, after its prefix


def rows_of(groups: Sequence[tuple[int, int]], *, common: int = 0, batch: int = 1, rank: int = 0) -> list[QueuedJob]:
    """Jobs with a prefix of a number of bytes, for each group, in order; all prefixes begin with `common` bytes."""
    rows = list[QueuedJob]()
    for number, (jobs, size) in enumerate(groups, 1):
        same = ENDS.index(min(common, size))
        head = [0] * same + [number << 16] * (ENDS.index(size) - same)
        for job in range(1, jobs + 1):
            keys = [*head, number << 16 | job]
            place = b"".join(key.to_bytes(4, "big") for key in keys) + b"end"
            rows.append(QueuedJob(JobId.of(batch, len(rows) + 1), rank, place, size + OWN_BYTES, None, None, 0, 0))
    return rows
