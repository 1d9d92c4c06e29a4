"""The fallback chain of a request, and its reason in the log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config import RouteEntry
from tokenmill.gateway.backends.routing import Choice, RouteQuery, choose_engines, is_pattern, matches
from tokenmill.gateway.monitoring.recorder import PriorityClass

NAMES = {"gpu": ("qwen", "qwen3", "gpu"), "cpu": ("qwen", "cpu"), "away": ("big", "away")}
RULES = (
    RouteEntry(("cpu",), lane="batch", min_prompt_tokens=1000),
    RouteEntry(("away", "gpu"), model="big"),
    RouteEntry(("gpu", "cpu"), model="gpt-*"),
    RouteEntry(("away",), key="alice", lane="interactive"),
    RouteEntry(("gpu", "cpu"), lane="interactive"),
)


@pytest.mark.parametrize(
    ("model", "lane", "tokens", "key", "engines", "reason"),
    [
        ("qwen", "batch", 2000, None, ("cpu",), "route 1: lane batch, tokens >= 1000"),
        ("qwen", "batch", 1000, None, ("cpu",), "route 1: lane batch, tokens >= 1000"),
        ("qwen", "batch", 999, None, ("gpu", "cpu"), "no route matches"),
        ("qwen", "batch", None, None, ("gpu", "cpu"), "no route matches"),  # not counted
        ("big", "interactive", None, None, ("away", "gpu"), "route 2: model big"),  # gpu stands in with what it has
        ("gpt-4o", "interactive", None, None, ("gpu", "cpu"), "route 3: model gpt-*"),
        ("qwen", "interactive", None, None, ("gpu", "cpu"), "route 5: lane interactive"),
        ("qwen3", "interactive", None, None, ("gpu",), "route 5: lane interactive"),  # cpu does not have it
        ("qwen", "interactive", None, "alice", ("gpu", "cpu"), "route 5: lane interactive"),  # away has no qwen
        (None, "interactive", None, "alice", ("away",), "route 4: lane interactive, key alice"),
        (None, "interactive", None, None, ("gpu", "cpu"), "route 5: lane interactive"),
        ("away", "batch", 10, None, ("away",), "no route matches"),  # an engine's own name
    ],
)
def test_the_first_rule_that_holds(
    model: str | None, lane: PriorityClass, tokens: int | None, key: str | None, engines: tuple[str, ...], reason: str
) -> None:
    assert choose_engines(RULES, NAMES, RouteQuery(model, lane, tokens, key)) == Choice(engines, reason)


def test_a_name_that_nothing_has() -> None:
    assert choose_engines(RULES, NAMES, RouteQuery("claude", "interactive", 5, None)) is None
    assert choose_engines((), NAMES, RouteQuery("claude", "interactive", 5, None)) is None
    everything = (RouteEntry(("cpu",), model="*"),)
    assert choose_engines(everything, NAMES, RouteQuery("claude", "interactive", 5, None)) == Choice(
        ("cpu",), "route 1: model *"
    )


def test_without_rules_whoever_has_the_model() -> None:
    assert choose_engines((), NAMES, RouteQuery("qwen", "batch", None, None)) == Choice(("gpu", "cpu"), None)
    assert choose_engines((), NAMES, RouteQuery(None, "batch", None, None)) == Choice(("gpu", "cpu"), None)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_lengths_are_inclusive(low: int, high: int, tokens: int) -> None:
    rule = RouteEntry(("cpu",), min_prompt_tokens=low, max_prompt_tokens=high)
    assert matches(rule, RouteQuery(None, "batch", tokens, None)) == (low <= tokens <= high)


@pytest.mark.parametrize(("model", "pattern"), [("qwen", False), ("gpt-*", True), ("gpt-?", True), ("a[bc]", True)])
def test_patterns(model: str, pattern: bool) -> None:
    assert is_pattern(model) is pattern
