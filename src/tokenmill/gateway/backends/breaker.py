"""A circuit breaker: after repeated failures, a backend gets no requests for a while, then a single trial request.

    closed ──failures in a row, or a lost connection──▶ open ──its wait is over, or it looks healthy again──▶ half-open
       ▲                                                 ▲                                                       │
       └──────────────── the trial succeeds ─────────────┼───────────────────────────────────────────────────────┤
                                                         └─────────── the trial fails: a longer wait ────────────┘

Pure: every method returns a new breaker, and the time is a parameter.
"""

from dataclasses import dataclass, replace
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Thresholds of a circuit breaker."""

    failures: int = 3  # in a row
    wait_s: float = 2.0  # after the first opening; each failed trial doubles it
    longest_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of one backend's circuit breaker."""

    rules: Rules = Rules()
    failures: int = 0  # in a row
    until_s: float | None = None  # open until then; None: closed
    wait_s: float = 0.0  # of the last opening
    lost: bool = False  # it opened because the backend did not respond at all
    trial: bool = False  # a trial request is in flight

    def state(self, now_s: float) -> BreakerState:
        """Closed, open or half-open."""
        if self.until_s is None:
            return "closed"
        return "half-open" if self.trial or now_s >= self.until_s else "open"

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent; half-open admits one at a time."""
        return self.until_s is None or (now_s >= self.until_s and not self.trial)

    def began(self, now_s: float) -> "Breaker":
        """Record that a request was sent; if half-open, it is the trial."""
        return replace(self, trial=True) if self.state(now_s) == "half-open" else self

    def succeeded(self) -> "Breaker":
        """Record a started answer. An answer to a request sent before the breaker opened is ignored."""
        if self.until_s is not None and not self.trial:
            return self
        return Breaker(self.rules)

    def failed(self, now_s: float, *, lost: bool = False) -> "Breaker":
        """Record a failed request. `lost`: the backend did not respond at all, which opens the breaker immediately."""
        if self.until_s is not None and not self.trial:
            return self
        failures = self.failures + 1
        if not self.trial and not lost and failures < self.rules.failures:
            return replace(self, failures=failures)
        wait_s = min(self.rules.longest_s, 2 * self.wait_s if self.trial else self.rules.wait_s)
        return Breaker(self.rules, failures, now_s + wait_s, wait_s, lost)

    def abandoned(self) -> "Breaker":
        """Record a request that tells nothing about the backend: the client disconnected, or it was invalid."""
        return replace(self, trial=False)

    def looks_healthy(self, now_s: float) -> "Breaker":
        """Record a successful health check. After a lost connection, the next request becomes the trial."""
        if self.until_s is None or not self.lost or now_s >= self.until_s:
            return self
        return replace(self, until_s=now_s)
