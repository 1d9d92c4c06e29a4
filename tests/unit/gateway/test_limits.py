"""Rate limits of keys, with a fake clock."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.http.keys import KeyLimits
from tokenmill.gateway.http.rate_limits import Bucket, Limiter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_a_minute() -> None:
    clock = Clock()
    limiter = Limiter(KeyLimits(requests_per_minute=3), clock)

    def ask() -> float | None:
        try:
            with limiter.admit("a"):
                return None
        except Busy as error:
            return error.retry_after_s

    assert [ask() for _ in range(4)] == [None, None, None, 20.0]
    clock.now_s = 20.0
    assert [ask() for _ in range(2)] == [None, 20.0]
    clock.now_s = 1000.0
    assert [ask() for _ in range(4)] == [None, None, None, 20.0]


def test_tokens_are_charged_when_they_are_known() -> None:
    clock = Clock()
    limiter = Limiter(KeyLimits(tokens_per_minute=60), clock)
    with limiter.admit("a") as charge:
        charge(100)
    with pytest.raises(Busy) as caught, limiter.admit("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(41.0)
    clock.now_s = 41.0
    with limiter.admit("a"):
        pass
    with limiter.admit("b"):
        pass


def test_at_once_and_a_keys_own_limits() -> None:
    limiter = Limiter(KeyLimits(requests_at_once=1), Clock())
    with ExitStack() as stack:
        stack.enter_context(limiter.admit("a"))
        with pytest.raises(Busy) as caught, limiter.admit("a"):
            pass
        assert caught.value.code == "concurrency_limit_exceeded"
        for _ in range(3):
            stack.enter_context(limiter.admit("b", KeyLimits(requests_at_once=3)))
    with limiter.admit("a"):
        pass


def test_without_limits_there_are_none() -> None:
    limiter = Limiter(KeyLimits(), Clock())
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limiter.admit("a"))(10**9)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60), st.integers(1, 100))
def test_never_more_than_was_there_and_came_in(uses: list[tuple[float, int]], per_minute: int) -> None:
    bucket, now_s, taken = Bucket(per_minute, per_minute, 0.0), 0.0, 0.0
    for passed_s, amount in uses:
        now_s += passed_s
        if bucket.wait_s(now_s, amount) == 0:
            bucket.take(now_s, amount)
            taken += amount
        assert bucket.level <= per_minute
    assert taken <= per_minute * (1 + now_s / 60) + 1e-6
