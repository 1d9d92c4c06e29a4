"""Growth rates of engine counters over the last few seconds. Pure; times are parameters."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from tokenmill.engine.engine import Counters

WINDOW_S = 3.0  # long enough to smooth out that engines update their counters a few times per second
COUNTED = ("generated_tokens", "prompt_tokens_computed", "prompt_tokens_reused")


@dataclass(slots=True)
class CounterRates:
    """The counters of one engine during the last few seconds."""

    window_s: float = WINDOW_S
    _recorded: deque[tuple[float, Counters]] = field(default_factory=deque)

    def add(self, now_s: float, counters: Counters) -> None:
        """Record counters; a restart of the engine clears the earlier ones."""
        if self._recorded and (
            _restarted(self._recorded[-1][1], counters) or now_s - self._recorded[-1][0] > 3 * self.window_s
        ):
            self._recorded.clear()
        self._recorded.append((now_s, counters))
        while len(self._recorded) > 2 and now_s - self._recorded[1][0] >= self.window_s:
            self._recorded.popleft()

    def per_s(self, name: str) -> float | None:
        """Growth per second of a counter; None if it is unknown or was recorded only once."""
        if len(self._recorded) < 2:
            return None
        (began_s, first), (ended_s, last) = self._recorded[0], self._recorded[-1]
        before = getattr(first, name)
        now = getattr(last, name)
        if before is None or now is None or ended_s <= began_s:
            return None
        return float(now - before) / (ended_s - began_s)


def _restarted(before: Counters, now: Counters) -> bool:
    pairs = ((getattr(before, name), getattr(now, name)) for name in (*COUNTED, "restarts"))
    fell = any(old is not None and new is not None and new < old for old, new in pairs)
    return fell or before.restarts != now.restarts


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is not exceeded by at least this share of the values; None without values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None
