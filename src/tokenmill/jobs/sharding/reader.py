"""Reads pending jobs between two positions of the queue, for several spans per query."""

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from tokenmill.jobs.models import QueuedJob, SortKey
from tokenmill.jobs.sharding.policy import Span
from tokenmill.jobs.store.backend import DatabaseBackend

_PLURALS = {
    "batch": "batches",
    "rank": "ranks",
    "place": "places",
    "id": "ids",
    "to_rank": "to_ranks",
    "to_place": "to_places",
    "to_id": "to_ids",
}


class PendingJobs(Protocol):
    """The store methods that sharding uses."""

    def waiting(self, batches: Sequence[int], *, after: SortKey | None = None, limit: int) -> list[QueuedJob]:
        """The next pending jobs in queue order."""

    def pending(self, batch: int) -> int:
        """The number of pending jobs of a batch."""

    def now_s(self) -> float:
        """The store's clock."""


class ShardReader:
    """Reads pending jobs within spans, except those in `unfit`.

    A server is queried once for all spans; SQLite once per span, because its queries take microseconds.
    """

    def __init__(self, store: PendingJobs, database: DatabaseBackend) -> None:
        self._store = store
        self._database = database

    def first(self, spans: Sequence[Span], unfit: Collection[int]) -> QueuedJob | None:
        """The first job of all spans in queue order."""
        if self._database.shared:
            row = self._database.one("first_between", **self._values_of_all(spans, unfit))
            return None if row is None else QueuedJob._make(row)
        rows = [row for found in self.rows(spans, unfit, 1) for row in found]
        return min(rows, key=lambda row: row.key, default=None)

    def rows(self, spans: Sequence[Span], unfit: Collection[int], limit: int) -> list[list[QueuedJob]]:
        """The first jobs of each span; on a server, every span must lie within one priority."""
        if not self._database.shared:
            rows = [self._database.all("waiting_between", limit=limit, **self._values(span, unfit)) for span in spans]
            return [[*map(QueuedJob._make, found)] for found in rows]
        found: list[list[QueuedJob]] = [[] for _ in spans]
        for at, *row in self._database.all("waiting_between", limit=limit, **self._values_of_all(spans, unfit)):
            found[at - 1].append(QueuedJob._make(row))
        return found

    def counts(self, spans: Sequence[Span], unfit: Collection[int], limit: int) -> list[int]:
        """Number of jobs in each span, counted up to a limit; every span must lie within one priority."""
        if self._database.shared:
            rows = self._database.all("count_between", limit=limit, **self._values_of_all(spans, unfit))
        else:
            rows = [self._database.one("count_between", limit=limit, **self._values(span, unfit)) for span in spans]
        return [jobs for (jobs,) in rows]

    def _values(self, span: Span, unfit: Collection[int]) -> dict[str, Any]:
        return {**_ends(span), "unfit": json.dumps([*unfit]), "now": self._store.now_s()}

    def _values_of_all(self, spans: Sequence[Span], unfit: Collection[int]) -> dict[str, Any]:
        rows = [_ends(span) for span in spans]
        columns = {plural: [row[name] for row in rows] for name, plural in _PLURALS.items()}
        return {**columns, "unfit": [*unfit], "now": self._store.now_s()}


def _ends(span: Span) -> dict[str, Any]:
    rank, batch, place, job = span.after
    to_rank, _, to_place, to_job = span.until
    return dict(zip(_PLURALS, (batch, rank, place, job, to_rank, to_place, to_job), strict=True))
