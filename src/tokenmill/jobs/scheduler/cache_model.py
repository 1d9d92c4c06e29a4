"""What is in an engine's cache, as far as what was sent and what came back tell, where it finds heads by itself.

A prompt that was sent is *cold* until its first token, then *warm*. Where sequences share (`shares`), a cold one counts
as there at once: the engine makes others wait for it. In a prefix cache only warm ones are found, and whoever needs
more than is warm while it is being computed must wait here, unless that is a few words. Mutating methods say so.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from math import inf

from tokenmill.jobs.scheduler.prefix_groups import Pending, shared_bytes, worth_bytes
from tokenmill.jobs.scheduler.shape import EngineShape


class PrefixIndex:
    """Prompts in the order in which they were last used."""

    def __init__(self) -> None:
        self.bytes = 0  # of all of them, shared heads counted once
        self._sorted: list[tuple[bytes, int]] = []
        self._records: dict[int, Pending] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, job: object) -> bool:
        return job in self._records

    def add(self, record: Pending) -> None:
        """Put a prompt in, or make it the youngest; mutates."""
        if self._records.pop(record.job, None) is None:
            self.bytes += self.extra_bytes(record)
            insort(self._sorted, (record.head, record.job))
        self._records[record.job] = record

    def drop(self, job: int) -> None:
        """Take a prompt out if it is there; mutates."""
        record = self._records.pop(job, None)
        if record is not None:
            del self._sorted[bisect_left(self._sorted, (record.head, job))]
            self.bytes -= self.extra_bytes(record)

    def clear(self) -> None:
        """Take all out; mutates."""
        self._sorted.clear()
        self._records.clear()
        self.bytes = 0

    def oldest(self, but: "PrefixIndex") -> int | None:
        """The job that was used longest ago and is not in another set. Mutates nothing."""
        return next((job for job in self._records if job not in but), None)

    def best(self, record: Pending) -> tuple[int, int | None]:
        """Bytes of a prompt that are here, and the job they are from. Mutates nothing."""
        at = bisect_left(self._sorted, (record.head, record.job))
        near = (self._records[job] for _, job in self._sorted[max(0, at - 1) : at + 2] if job != record.job)
        found = max(((shared_bytes(record, other), other.job) for other in near), default=(0, None))
        return found if found[0] else (0, None)

    def extra_bytes(self, record: Pending) -> int:
        """Bytes that a prompt takes beyond what is here. Mutates nothing."""
        return record.prompt_bytes - self.best(record)[0]


_MOST = 512  # prompts that are remembered


class CacheModel:
    """Prompts in one engine."""

    def __init__(self, shape: EngineShape, tokens: Callable[[int], int]) -> None:
        self.running = PrefixIndex()
        self._shape = shape
        self._tokens = tokens
        self._there = PrefixIndex()
        self._cold: dict[int, Pending] = {}  # in the order they were sent

    @property
    def cold(self) -> Iterable[Pending]:
        """Prompts that are being computed or wait for it, the first sent first."""
        return self._cold.values()

    def find(self, record: Pending) -> tuple[int, int | None]:
        """Bytes of a prompt that need not be computed, and the job they are from."""
        return self._there.best(record)

    def ready(self, record: Pending) -> bool:
        """Whether nobody is computing so much more of a prompt than is found now that it is worth waiting for."""
        if self._shape.reuse != "prefix cache":
            return True
        found = worth_bytes(self._there.best(record)[0])
        return all(worth_bytes(shared_bytes(record, cold)) <= found for cold in self.cold)

    def apart(self, record: Pending) -> bool:
        """Whether nobody is computing any more of a prompt than is found now."""
        if self._shape.reuse != "prefix cache":
            return True
        found = self._there.best(record)[0]
        return all(shared_bytes(record, cold) <= found for cold in self.cold)

    def sent(self, record: Pending) -> None:
        """A job was sent; mutates."""
        self.running.add(record)
        self._cold[record.job] = record
        if self._shape.reuse == "shares":
            self._add(record)

    def warmed(self, record: Pending) -> None:
        """A prompt is computed; mutates."""
        self._cold.pop(record.job, None)
        if self._shape.reuse in ("shares", "prefix cache"):
            self._add(record)

    def ended(self, record: Pending, *, answered: bool) -> bool:
        """A job is no longer in the engine; mutates. Whether it never was warm, and others may miss it."""
        self.running.drop(record.job)
        if answered:
            self.warmed(record)
        if self._cold.pop(record.job, None) is None:
            return False
        self._there.drop(record.job)
        return True

    def clear(self) -> None:
        """The engine is a new one; mutates."""
        for heads in (self.running, self._there):
            heads.clear()
        self._cold.clear()

    def find_again(self) -> dict[int, tuple[int, int | None]]:
        """What each cold prompt finds now among those before it; mutates only for a moment."""
        for record in self.cold:
            self._there.drop(record.job)
        found = dict[int, tuple[int, int | None]]()
        for record in self.cold:
            found[record.job] = self._there.best(record)
            if self._shape.reuse == "shares":
                self._there.add(record)
        return found

    def _add(self, record: Pending) -> None:
        """A prompt is in the cache; what was used longest ago may have gone for it; mutates."""
        self._there.add(record)
        cells = self._shape.cells_total or inf
        while len(self._there) > _MOST or self._tokens(self._there.bytes) > cells:
            oldest = self._there.oldest(self.running)
            if oldest is None:
                return
            self._there.drop(oldest)
