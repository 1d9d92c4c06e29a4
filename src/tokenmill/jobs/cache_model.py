"""What is in an engine's cache, as far as what was sent and what came back tell, where it finds heads by itself.

A prompt that was sent is *cold* until its first token, then *warm*. Where sequences share (`shares`), a cold one counts
as there at once: the engine makes others wait for it. In a prefix cache only warm ones are found, and whoever needs
more than is warm while it is being computed must wait here, unless that is a few words. Mutating methods say so.
"""

from collections.abc import Callable, Iterable
from math import inf

from tokenmill.jobs.forest import Pending, shared_bytes, worth_bytes
from tokenmill.jobs.prefix_index import PrefixIndex
from tokenmill.jobs.shape import EngineShape

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
