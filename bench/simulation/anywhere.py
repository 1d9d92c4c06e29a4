"""A baseline without shards: every job may run on any engine, and every engine has its share from the beginning.

An idle engine takes half of the pending jobs of the engine with the most, or all of them if that engine is gone, if
this is worth recomputing the prefixes. Sharing costs no time.
"""

from collections.abc import Iterable, Sequence

from bench.simulation.engine import Work
from bench.simulation.sharing import Moved, Range, Sharer
from bench.simulation.table import Table

from tokenmill.jobs.scheduler.estimates import MeasuredRates


class Anywhere:
    """Assigns jobs to engines; has the interface of `sharing.Sharing`. All methods mutate."""

    def __init__(
        self, table: Table, shares: Sequence[Range], most_jobs: int, lanes: int, rates: MeasuredRates, moved: Moved
    ) -> None:
        self._table = table
        self._moved = moved
        self._prefill_tok_s = rates.prefill_tok_s or 0.0
        self._decode_tok_s = rates.decode_at(lanes) or 0.0
        self.stretches = self.taken = 0
        self._shares: dict[int, dict[int, Work]] = {}  # pending works, by seat
        self._seconds: dict[int, float] = {}  # their number
        self._open: set[int] = set()  # seats whose engine exists, or has been gone for long enough
        self._seats: dict[int, int] = {}  # number of works
        self._there: dict[int, Sharer] = {}
        for seat, (first, end) in enumerate(shares):
            works = list(table.works(first, end, most_jobs, finer=lanes))
            self._shares[seat], self._seconds[seat] = {}, 0.0
            self._put(seat, works)

    def join(self, runner: Sharer) -> None:
        """An engine has started."""
        self._open.add(runner.seat)
        self._there[runner.seat] = runner

    def fail(self, runner: Sharer) -> None:
        """An engine has failed; unnoticed until its lease expires."""
        self._open.discard(runner.seat)
        self._there.pop(runner.seat)

    def leave(self, runner: Sharer, lost: Iterable[Range]) -> None:
        """The lease of an engine has expired."""
        self._open.add(runner.seat)
        self._put(runner.seat, [self._table.work(first, end) for first, end in lost])

    def sent(self, work: Work) -> None:
        """A work is no longer pending."""
        self._drop(self._seats[work.number], work)

    def window(self, runner: Sharer, now_s: float, own: int, *, again: bool) -> list[Work]:
        """The next works of an engine: its own share, then those of others."""
        if runner.began_s is None:
            runner.began_s = now_s
            return sorted(self._shares[runner.seat].values(), key=lambda work: work.first)
        return self._take_over(runner.seat) if again and not own else []

    def _take_over(self, seat: int) -> list[Work]:
        victim = max(self._open, key=lambda other: (self._seconds[other], -other))
        chosen = list[Work]()
        seconds = 0.0
        heads = dict[int, float]()
        half_s = self._seconds[victim] / (2 if victim in self._there else 1)
        for work in reversed(self._shares[victim].values()):
            if seconds >= half_s:
                break
            chosen.append(work)
            seconds += self._work_s(work)
            heads |= dict(work.path)
        if victim == seat or seconds <= sum(heads.values()) / self._prefill_tok_s:
            return []
        self.taken += 1
        for work in chosen:
            self._drop(victim, work)
        if victim in self._there:
            self._moved(self._there[victim], chosen, [])
        self._put(seat, chosen)
        return chosen

    def _put(self, seat: int, works: Iterable[Work]) -> None:
        for work in works:
            self._shares[seat][work.number] = work
            self._seconds[seat] += self._work_s(work)
            self._seats[work.number] = seat

    def _drop(self, seat: int, work: Work) -> None:
        del self._shares[seat][work.number], self._seats[work.number]
        self._seconds[seat] -= self._work_s(work)

    def _work_s(self, work: Work) -> float:
        """Tokens of a work without its prefix."""
        return work.prompt_tokens / self._prefill_tok_s + work.output_tokens / self._decode_tok_s
