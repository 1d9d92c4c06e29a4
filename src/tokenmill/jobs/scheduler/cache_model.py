"""Model of an engine's prefix cache, inferred from requests and responses, for engines that match prefixes themselves.

A prompt is *cold* from the time it is sent until its first token arrives, then *warm*. If sequences share cells
(`shares`), a cold prompt counts as cached immediately, because the engine makes other requests wait for it. A prefix
cache contains only warm prompts: a job that shares more with a cold prompt than with any warm one is held back until
that prompt is warm, unless the difference is too short to matter.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from math import inf

from tokenmill.jobs.scheduler.prefix_groups import Pending, shared_bytes, worth_bytes
from tokenmill.jobs.scheduler.shape import EngineShape


class PrefixIndex:
    """A set of prompts, searchable by prefix and ordered by last use."""

    def __init__(self) -> None:
        self.bytes = 0  # of all prompts, each shared prefix counted once
        self._sorted: list[tuple[bytes, int]] = []
        self._records: dict[int, Pending] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, job: object) -> bool:
        return job in self._records

    def add(self, record: Pending) -> None:
        """Add a prompt, or mark it as the most recently used."""
        if self._records.pop(record.job, None) is None:
            self.bytes += self.extra_bytes(record)
            insort(self._sorted, (record.prefix_key, record.job))
        self._records[record.job] = record

    def drop(self, job: int) -> None:
        """Remove a prompt if it is present."""
        record = self._records.pop(job, None)
        if record is not None:
            del self._sorted[bisect_left(self._sorted, (record.prefix_key, job))]
            self.bytes -= self.extra_bytes(record)

    def clear(self) -> None:
        """Remove all prompts."""
        self._sorted.clear()
        self._records.clear()
        self.bytes = 0

    def oldest(self, *, excluding: "PrefixIndex") -> int | None:
        """The least recently used job that is not in `excluding`, or None."""
        return next((job for job in self._records if job not in excluding), None)

    def best(self, record: Pending) -> tuple[int, int | None]:
        """The bytes that a prompt shares with the most similar other prompt, and that prompt's job."""
        at = bisect_left(self._sorted, (record.prefix_key, record.job))
        near = (self._records[job] for _, job in self._sorted[max(0, at - 1) : at + 2] if job != record.job)
        found = max(((shared_bytes(record, other), other.job) for other in near), default=(0, None))
        return found if found[0] else (0, None)

    def extra_bytes(self, record: Pending) -> int:
        """Bytes that adding a prompt would add."""
        return record.prompt_bytes - self.best(record)[0]


_MAX_PROMPTS = 512  # per engine, in addition to those of running jobs


class CacheModel:
    """The prompts that one engine has cached or is computing."""

    def __init__(self, shape: EngineShape, tokens: Callable[[int], int]) -> None:
        self.running = PrefixIndex()
        self._shape = shape
        self._tokens = tokens
        self._cached = PrefixIndex()
        self._cold: dict[int, Pending] = {}  # in the order in which they were sent

    @property
    def cold(self) -> Iterable[Pending]:
        """Prompts being computed or queued in the engine, the first sent first."""
        return self._cold.values()

    def find(self, record: Pending) -> tuple[int, int | None]:
        """Bytes of a prompt that are expected to be cached, and the job that computed them."""
        return self._cached.best(record)

    def ready(self, record: Pending) -> bool:
        """Whether no cold prompt shares enough more of this prompt than the cache to be worth waiting for."""
        if self._shape.reuse != "prefix cache":
            return True
        found = worth_bytes(self._cached.best(record)[0])
        return all(worth_bytes(shared_bytes(record, cold)) <= found for cold in self.cold)

    def independent(self, record: Pending) -> bool:
        """Whether no cold prompt shares more of this prompt than the cache."""
        if self._shape.reuse != "prefix cache":
            return True
        found = self._cached.best(record)[0]
        return all(shared_bytes(record, cold) <= found for cold in self.cold)

    def sent(self, record: Pending) -> None:
        """Record that a job was sent."""
        self.running.add(record)
        self._cold[record.job] = record
        if self._shape.reuse == "shares":
            self._add(record)

    def warmed(self, record: Pending) -> None:
        """Record that a prompt was computed."""
        self._cold.pop(record.job, None)
        if self._shape.reuse in ("shares", "prefix cache"):
            self._add(record)

    def ended(self, record: Pending, *, answered: bool) -> bool:
        """Record that a job ended; returns whether it was still cold, in which case its prompt was not cached."""
        self.running.drop(record.job)
        if answered:
            self.warmed(record)
        if self._cold.pop(record.job, None) is None:
            return False
        self._cached.drop(record.job)
        return True

    def clear(self) -> None:
        """Forget everything after an engine restart."""
        for index in (self.running, self._cached):
            index.clear()
        self._cold.clear()

    def find_for_cold(self) -> dict[int, tuple[int, int | None]]:
        """For each cold prompt, what `find` returns if only the warm prompts and those sent before it are cached."""
        for record in self.cold:
            self._cached.drop(record.job)
        found = dict[int, tuple[int, int | None]]()
        for record in self.cold:
            found[record.job] = self._cached.best(record)
            if self._shape.reuse == "shares":
                self._cached.add(record)
        return found

    def _add(self, record: Pending) -> None:
        """Add a prompt, and evict the least recently used ones that exceed the engine's capacity."""
        self._cached.add(record)
        cells = self._shape.cells_total or inf
        while len(self._cached) > _MAX_PROMPTS + len(self.running) or self._tokens(self._cached.bytes) > cells:
            oldest = self._cached.oldest(excluding=self.running)
            if oldest is None:
                return
            self._cached.drop(oldest)
