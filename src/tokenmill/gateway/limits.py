"""What one key may use: requests at once, requests and tokens a minute.

Buckets that fill steadily: a minute's worth may be used at once, and then as fast as it comes in. Tokens are charged
when they are known, at the end; whoever has used more than was there waits until the debt is gone. The clock is the
caller's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenmill.gateway.faults import Busy
from tokenmill.gateway.keys import KeyLimits

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A store that fills to `per_minute` within a minute; may be in debt."""

    per_minute: float
    level: float
    seen_s: float

    def wait_s(self, now_s: float, wanted: float) -> float:
        """How long until there is enough; 0: now."""
        self.fill(now_s)
        return max(0.0, (wanted - self.level) * MINUTE_S / self.per_minute)

    def take(self, now_s: float, amount: float) -> None:
        """Take something out, whether it is there or not."""
        self.fill(now_s)
        self.level -= amount

    def fill(self, now_s: float) -> None:
        """Let in what has come since."""
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
    """What all keys have used; requests without a key count as one client."""

    usual: KeyLimits
    clock: Callable[[], float]
    _uses: dict[str, _Use] = field(default_factory=dict)

    @contextmanager
    def admit(self, name: str, own: KeyLimits | None = None) -> Iterator[Callable[[int], None]]:
        """Hold a place for one request; Busy where the limits do not allow it. Gives what tokens are charged with."""
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
        # A bucket that is at least above nothing lets one in: how much it takes is not known before.
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
    """The bucket for a limit; one that changed starts full."""
    if per_minute is None:
        return None
    return bucket if bucket is not None and bucket.per_minute == per_minute else Bucket(per_minute, per_minute, now_s)


def _over(what: str, wait_s: float) -> Busy:
    return Busy(f"this key may have {what}", retry_after_s=wait_s, code="rate_limit_exceeded", kind="limits")
