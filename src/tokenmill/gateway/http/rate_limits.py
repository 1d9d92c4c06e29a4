"""Rate limits of an API key: concurrent requests, and requests and tokens per minute.

Token buckets with a capacity of one minute. Tokens are charged when they are known, at the end; a client that used more
than was available waits until the debt is gone. The caller passes the time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.http.keys import KeyLimits

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A bucket that fills to `per_minute` within a minute; its level may be negative."""

    per_minute: float
    level: float
    seen_s: float

    def wait_s(self, now_s: float, wanted: float) -> float:
        """Seconds until enough is available; 0: now."""
        self.fill(now_s)
        return max(0.0, (wanted - self.level) * MINUTE_S / self.per_minute)

    def take(self, now_s: float, amount: float) -> None:
        """Take an amount, even if it is not available."""
        self.fill(now_s)
        self.level -= amount

    def fill(self, now_s: float) -> None:
        """Add what has accrued since the last call."""
        passed_s = max(0.0, now_s - self.seen_s)
        self.level = min(self.per_minute, self.level + passed_s * self.per_minute / MINUTE_S)
        self.seen_s = now_s


@dataclass(slots=True)
class _Use:
    at_once: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True)
class Limiter:
    """Usage of all keys; requests without a key count as one client."""

    usual: KeyLimits
    clock: Callable[[], float]
    _uses: dict[str, _Use] = field(default_factory=dict)

    @contextmanager
    def admit(self, name: str, own: KeyLimits | None = None) -> Iterator[Callable[[int], None]]:
        """Hold a place for one request; raises Busy if a limit is reached. Yields the function that charges tokens."""
        limits = self._limits(own)
        now_s = self.clock()
        use = self._use(name, limits, now_s)
        if limits.requests_at_once is not None and use.at_once >= limits.requests_at_once:
            raise Busy(
                f"{use.at_once} requests of this key are running, and no more may",
                retry_after_s=1.0,
                code="concurrency_limit_exceeded",
                kind="limits",
            )
        if use.requests is not None and (wait_s := use.requests.wait_s(now_s, 1.0)):
            raise _over(f"{limits.requests_per_minute} requests a minute", wait_s)
        # A positive level admits a request, because its cost is not known in advance.
        if use.tokens is not None and (wait_s := use.tokens.wait_s(now_s, 1.0)):
            raise _over(f"{limits.tokens_per_minute} tokens a minute", wait_s)
        if use.requests is not None:
            use.requests.take(now_s, 1.0)
        use.at_once += 1

        def charge(tokens: int) -> None:
            if use.tokens is not None:
                use.tokens.take(self.clock(), tokens)

        try:
            yield charge
        finally:
            use.at_once -= 1

    def _limits(self, own: KeyLimits | None) -> KeyLimits:
        own = own or KeyLimits()
        usual = self.usual
        return KeyLimits(
            own.requests_at_once or usual.requests_at_once,
            own.requests_per_minute or usual.requests_per_minute,
            own.tokens_per_minute or usual.tokens_per_minute,
        )

    def _use(self, name: str, limits: KeyLimits, now_s: float) -> _Use:
        use = self._uses.setdefault(name, _Use())
        use.requests = _fitted(use.requests, limits.requests_per_minute, now_s)
        use.tokens = _fitted(use.tokens, limits.tokens_per_minute, now_s)
        return use


def _fitted(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    """The bucket for a limit; a changed limit starts with a full one."""
    if per_minute is None:
        return None
    return bucket if bucket is not None and bucket.per_minute == per_minute else Bucket(per_minute, per_minute, now_s)


def _over(what: str, wait_s: float) -> Busy:
    return Busy(f"this key may have {what}", retry_after_s=wait_s, code="rate_limit_exceeded", kind="limits")
