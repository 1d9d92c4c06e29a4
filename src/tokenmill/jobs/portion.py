"""What one of several workers may take of the pending jobs, so that each head is computed by as few as needed.

A portion only says who should take what. That no job is taken twice is the store's affair: `Store.start` gives it to
one. So a portion may change hands at any moment, and what was read from it before is no promise.
"""

from collections.abc import Sequence
from typing import Protocol

from tokenmill.jobs.job import Waiting


class Portion(Protocol):
    """One worker's. Called from the thread of its books, one call after another."""

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        """The next pending jobs of these batches, by priority, batch and place within each stretch that it gets.

        `again`: from the beginning of what it has. Fewer than the limit: no more is to be had for now.
        """

    def has(self, waiting: Waiting) -> bool:
        """Whether it may take this one, which was found in another way than through the window."""

    def tend(self) -> None:
        """From time to time, at least every second: its worker lives."""

    def close(self) -> None:
        """Its worker takes nothing more: what it has and did not begin is anyone's."""
