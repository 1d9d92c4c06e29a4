"""What a store on PostgreSQL costs its runners: seconds of calls, and waiting for each other.

    a turn      one runner at a time chooses its next jobs; the more runners there are, the more it has to look at
    writing     jobs that are started and answers that are committed, one call after the other or several at once

Knows no jobs.
"""

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapreplace


@dataclass(frozen=True, slots=True)
class StoreCosts:
    """Of one server."""

    start_s: float  # for each job
    commit_s: float  # for each answer
    turns_s: tuple[tuple[int, float], ...]  # of one turn, by the number of other runners
    writers: int = 1  # calls that the server does at once as fast as one

    def turn_s(self, others: int) -> float:
        """Of one turn, between those that were measured."""
        counts = [count for count, _ in self.turns_s]
        at = bisect_left(counts, others)
        if at == 0 or at == len(counts):
            return self.turns_s[min(at, len(counts) - 1)][1]
        (low, low_s), (high, high_s) = self.turns_s[at - 1 : at + 1]
        return low_s + (high_s - low_s) * (others - low) / (high - low)


class Queue:
    """Calls in the order in which they come, so many at once."""

    def __init__(self, at_once: int) -> None:
        self._free_s = [0.0] * at_once
        self.busy_s = 0.0

    def end_s(self, now_s: float, takes_s: float) -> float:
        """When a call that comes now is done; mutates."""
        end_s = max(now_s, self._free_s[0]) + takes_s
        heapreplace(self._free_s, end_s)
        self.busy_s += takes_s
        return end_s
