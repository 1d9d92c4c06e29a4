"""Model of an engine's prefix cache, inferred from requests and responses, for engines that match prefixes themselves.

A prompt that was sent is *cold* until its first token, then *warm*. If sequences share cells (`shares`), a cold prompt
counts as cached immediately, because the engine lets other requests wait for it. In a prefix cache only warm prompts
are found: a job that needs more of a cold prompt than is warm must wait here, unless the difference is too short to
matter.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from math import inf

from tokenmill.jobs.scheduler.prefix_groups import Pending, shared_bytes, worth_bytes
from tokenmill.jobs.scheduler.shape import EngineShape


class PrefixIndex:
    """Prompts in order of last use."""

    def __init__(self) -> None:
        self.bytes = 0  # of all prompts, shared prefixes counted once
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

    def oldest(self, but: "PrefixIndex") -> int | None:
        """The least recently used job that is not in another index, or None."""
        return next((job for job in self._records if job not in but), None)

    def best(self, record: Pending) -> tuple[int, int | None]:
        """Bytes of a prompt that are present, and the job they come from."""
        at = bisect_left(self._sorted, (record.prefix_key, record.job))
        near = (self._records[job] for _, job in self._sorted[max(0, at - 1) : at + 2] if job != record.job)
        found = max(((shared_bytes(record, other), other.job) for other in near), default=(0, None))
        return found if found[0] else (0, None)

    def extra_bytes(self, record: Pending) -> int:
        """Additional bytes that a prompt would take."""
        return record.prompt_bytes - self.best(record)[0]


_MAX_PROMPTS = 512  # prompts that are remembered


class CacheModel:
    """The prompts in one engine."""

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
        """Bytes of a prompt that need not be computed, and the job they come from."""
        return self._cached.best(record)

    def ready(self, record: Pending) -> bool:
        """False if a cold prompt will soon provide enough more of this prompt to be worth waiting for."""
        if self._shape.reuse != "prefix cache":
            return True
        found = worth_bytes(self._cached.best(record)[0])
        return all(worth_bytes(shared_bytes(record, cold)) <= found for cold in self.cold)

    def independent(self, record: Pending) -> bool:
        """False if a cold prompt will soon provide any more of this prompt."""
        if self._shape.reuse != "prefix cache":
            return True
        found = self._cached.best(record)[0]
        return all(shared_bytes(record, cold) <= found for cold in self.cold)

    def sent(self, record: Pending) -> None:
        """Note that a job was sent."""
        self.running.add(record)
        self._cold[record.job] = record
        if self._shape.reuse == "shares":
            self._add(record)

    def warmed(self, record: Pending) -> None:
        """Note that a prompt was computed."""
        self._cold.pop(record.job, None)
        if self._shape.reuse in ("shares", "prefix cache"):
            self._add(record)

    def ended(self, record: Pending, *, answered: bool) -> bool:
        """Note that a job left the engine; returns whether it was still cold, so that others may miss its prompt."""
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

    def find_again(self) -> dict[int, tuple[int, int | None]]:
        """For each cold prompt, the bytes that it finds among the warm prompts and the cold ones sent before it."""
        for record in self.cold:
            self._cached.drop(record.job)
        found = dict[int, tuple[int, int | None]]()
        for record in self.cold:
            found[record.job] = self._cached.best(record)
            if self._shape.reuse == "shares":
                self._cached.add(record)
        return found

    def _add(self, record: Pending) -> None:
        """Add a prompt to the cache, evicting the least recently used ones beyond the engine's capacity."""
        self._cached.add(record)
        cells = self._shape.cells_total or inf
        while len(self._cached) > _MAX_PROMPTS or self._tokens(self._cached.bytes) > cells:
            oldest = self._cached.oldest(self.running)
            if oldest is None:
                return
            self._cached.drop(oldest)
