"""The circuit breaker, step by step and under any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.gateway.backends.breaker import Breaker, Rules

RULES = Rules(failures=3, wait_s=2.0, longest_s=60.0)


def after(steps: str) -> tuple[Breaker, float]:
    """Letters: b began, s succeeded, f failed, x lost, l left, h looks healthy, digits: seconds pass."""
    breaker, now_s = Breaker(RULES), 100.0
    for step in steps:
        match step:
            case "b":
                breaker = breaker.began(now_s)
            case "s":
                breaker = breaker.succeeded()
            case "f":
                breaker = breaker.failed(now_s)
            case "x":
                breaker = breaker.failed(now_s, lost=True)
            case "l":
                breaker = breaker.abandoned()
            case "h":
                breaker = breaker.looks_healthy(now_s)
            case _:
                now_s += int(step)
    return breaker, now_s


@pytest.mark.parametrize(
    ("steps", "position", "allows"),
    [
        ("", "closed", True),
        ("bfbf", "closed", True),  # two in a row are not three
        ("bfbfbf", "open", False),
        ("bfbfbsbfbf", "closed", True),  # an answer in between starts the count anew
        ("bx", "open", False),  # nothing answered: once is enough
        ("bx1", "open", False),
        ("bx2", "half-open", True),
        ("bx2b", "half-open", False),  # one trial at a time
        ("bx2bs", "closed", True),
        ("bx2bl", "half-open", True),  # the trial's client left: the next may try
        ("bx2bf", "open", False),  # one failed trial is enough, ...
        ("bx2bf2", "open", False),  # ... and the wait is twice as long
        ("bx2bf4", "half-open", True),
        ("bx2bf4bf4", "open", False),
        ("bx2bf4bs", "closed", True),
        ("bxh", "half-open", True),  # it answers its health page again
        ("bfbfbfh", "open", False),  # one that answers, but wrongly, is not believed
        ("bfbfbfs", "open", False),  # an answer to what was sent before closes nothing
        ("bfbfbff2", "half-open", True),  # nor does a late failure prolong it
    ],
)
def test_steps(steps: str, position: str, allows: bool) -> None:
    breaker, now_s = after(steps)
    assert (breaker.state(now_s), breaker.allows(now_s)) == (position, allows)


def test_the_wait_has_a_limit() -> None:
    steps = "bx2b" + "f9999999b" * 8 + "f"
    breaker, now_s = after(steps)
    assert breaker.wait_s == RULES.longest_s
    assert not breaker.allows(now_s + RULES.longest_s - 1)
    assert breaker.allows(now_s + RULES.longest_s)


@given(st.text("bsfxlh1234"))
def test_it_never_stays_shut(steps: str) -> None:
    """Whatever happened, the longest wait later one request may try, and its answer closes the breaker."""
    breaker, now_s = after(steps)
    later_s = now_s + RULES.longest_s
    trying = breaker.abandoned()
    assert trying.allows(later_s)
    assert trying.began(later_s).succeeded().state(later_s) == "closed"


@given(st.text("bsfxlh1234"))
def test_half_open_lets_one_in(steps: str) -> None:
    breaker, now_s = after(steps)
    if breaker.state(now_s) == "half-open" and breaker.allows(now_s):
        assert not breaker.began(now_s).allows(now_s)


@given(st.text("bsl1234"))
def test_without_failures_it_stays_closed(steps: str) -> None:
    breaker, now_s = after(steps)
    assert breaker.state(now_s) == "closed"
