"""Costs of a store on PostgreSQL: seconds of calls, and waiting for other workers.

    a turn      one worker at a time chooses its next jobs; the more workers there are, the more it has to read
    writing     jobs that are started and answers that are committed, sequentially or several calls concurrently

Does not know jobs.
"""

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapreplace


@dataclass(frozen=True, slots=True)
class StoreCosts:
    """Costs of one server."""

    start_s: float  # per job
    commit_s: float  # per answer
    turns_s: tuple[tuple[int, float], ...]  # seconds of one turn, by the number of other workers
    writers: int = 1  # calls that the server handles concurrently at the speed of one

    def turn_s(self, others: int) -> float:
        """Seconds of one turn, interpolated between measurements."""
        counts = [count for count, _ in self.turns_s]
        at = bisect_left(counts, others)
        if at == 0 or at == len(counts):
            return self.turns_s[min(at, len(counts) - 1)][1]
        (low, low_s), (high, high_s) = self.turns_s[at - 1 : at + 1]
        return low_s + (high_s - low_s) * (others - low) / (high - low)


class Queue:
    """Calls in order of arrival, a limited number concurrently."""

    def __init__(self, at_once: int) -> None:
        self._free_s = [0.0] * at_once
        self.busy_s = 0.0

    def end_s(self, now_s: float, takes_s: float) -> float:
        """When a call that arrives now is done; mutates."""
        end_s = max(now_s, self._free_s[0]) + takes_s
        heapreplace(self._free_s, end_s)
        self.busy_s += takes_s
        return end_s
