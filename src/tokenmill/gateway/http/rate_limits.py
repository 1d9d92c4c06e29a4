"""Rate limits of an API key: concurrent requests, requests and tokens per minute, tokens per day.

Token buckets that hold one minute's worth. Tokens are charged at the end of a request, when their number is known, so
a bucket can go negative; the client then waits until it is positive again. The clock is a parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.http.keys import LIMITS, KeyLimits
from tokenmill.gateway.http.token_budget import TokenBudget

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A bucket that fills to `per_minute` within a minute; its level may be negative."""

    per_minute: float
    level: float
    seen_s: float

    def wait_s(self, now_s: float, wanted: float) -> float:
        """Seconds until `wanted` is available; 0 if it is."""
        self.fill(now_s)
        return max(0.0, (wanted - self.level) * MINUTE_S / self.per_minute)

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`; the level may become negative."""
        self.fill(now_s)
        self.level -= amount

    def fill(self, now_s: float) -> None:
        """Refill for the time since the last call."""
        passed_s = max(0.0, now_s - self.seen_s)
        self.level = min(self.per_minute, self.level + passed_s * self.per_minute / MINUTE_S)
        self.seen_s = now_s


@dataclass(slots=True)
class _Usage:
    running: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True)
class Limiter:
    """Applies the limits of all keys; requests without a key count as one client."""

    defaults: KeyLimits
    clock: Callable[[], float]
    budget: TokenBudget | None = None  # None: tokens per day are not limited
    _uses: dict[str, _Usage] = field(default_factory=dict)

    @contextmanager
    def admit(self, name: str, own: KeyLimits | None = None) -> Iterator[Callable[[int], None]]:
        """Admit one request for the duration of the block; yields a function that charges tokens.

        Raises Busy if a limit is reached.
        """
        limits = self.limits(own)
        now_s = self.clock()
        use = self._use(name, limits, now_s)
        if limits.requests_at_once is not None and use.running >= limits.requests_at_once:
            raise Busy(
                f"this key is limited to {limits.requests_at_once} concurrent requests",
                retry_after_s=1.0,
                code="concurrency_limit_exceeded",
                kind="limits",
            )
        if use.requests is not None and (wait_s := use.requests.wait_s(now_s, 1.0)):
            raise _limited(f"{limits.requests_per_minute} requests per minute", wait_s)
        # Any positive level admits a request, because its cost is not known in advance.
        if use.tokens is not None and (wait_s := use.tokens.wait_s(now_s, 1.0)):
            raise _limited(f"{limits.tokens_per_minute} tokens per minute", wait_s)
        if wait_s := self.daily_wait_s(name, limits):
            raise Busy(
                f"this key is limited to {limits.tokens_per_day:,} tokens per day (UTC), batches included",
                retry_after_s=wait_s,
                code="daily_tokens_exceeded",
                kind="limits",
            )
        if use.requests is not None:
            use.requests.take(now_s, 1.0)
        use.running += 1

        def charge(tokens: int) -> None:
            if use.tokens is not None:
                use.tokens.take(self.clock(), tokens)
            self.charge_day(name, tokens)

        try:
            yield charge
        finally:
            use.running -= 1

    def limits(self, own: KeyLimits | None) -> KeyLimits:
        """The limits of a key, with the configured defaults."""
        own = own or KeyLimits()
        return KeyLimits(**{name: getattr(own, name) or getattr(self.defaults, name) for name in LIMITS})

    def daily_wait_s(self, name: str, limits: KeyLimits) -> float:
        """Seconds until a client may use tokens again; 0 if its tokens of the day are not used up."""
        return 0.0 if self.budget is None else self.budget.wait_s(name, limits.tokens_per_day)

    def charge_day(self, name: str, tokens: int) -> None:
        """Count tokens of a batch, which are limited per day only."""
        if self.budget is not None and tokens:
            self.budget.charge(name, tokens)

    def _use(self, name: str, limits: KeyLimits, now_s: float) -> _Usage:
        use = self._uses.setdefault(name, _Usage())
        use.requests = _fitted(use.requests, limits.requests_per_minute, now_s)
        use.tokens = _fitted(use.tokens, limits.tokens_per_minute, now_s)
        return use


def _fitted(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    """The bucket for a limit; a changed limit starts with a full bucket."""
    if per_minute is None:
        return None
    return bucket if bucket is not None and bucket.per_minute == per_minute else Bucket(per_minute, per_minute, now_s)


def _limited(limit: str, wait_s: float) -> Busy:
    return Busy(f"this key is limited to {limit}", retry_after_s=wait_s, code="rate_limit_exceeded", kind="limits")
