"""Markup is escaped, axes are readable, labels do not overlap."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from tokenmill.report.svg import (
    Scale,
    joined,
    nice_ticks,
    spread,
    tag,
    thinned,
    tick_text,
    token_ticks,
    tokens_text,
    visible,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("a\"b'c&d", "a&#34;b&#39;c&amp;d"),
        ("rtl \u202egpj", "rtl \\u202egpj"),
        ("bell\x07 escape\x1b[31m", "bell\\u0007 escape\\u001b[31m"),
        ("lone \udc80", "lone \\udc80"),
        ("na\u200bme", "na\\u200bme"),
    ],
)
def test_text_is_escaped(text: str, shown: str) -> None:
    assert joined(text) == shown


@given(st.text())
def test_escaped_text_holds_no_markup(text: str) -> None:
    found = joined(text)
    assert not set(found) & set("<>\"'")
    assert found.encode("utf-8").decode() == found


def test_elements() -> None:
    assert tag("p", "a < b", None, tag("b", "c"), class_="x y", data_n=1.0) == (
        '<p class="x y" data-n="1">a &lt; b<b>c</b></p>'
    )
    assert tag("rect", x=1.25, fill=None) == '<rect x="1.2"/>'
    assert tag("a", "t", href='"><script>') == '<a href="&#34;&gt;&lt;script&gt;">t</a>'
    assert joined("<", Markup("<br>"), None) == "&lt;<br>"


def test_escaping_once_is_enough() -> None:
    assert joined(joined("a&b")) == "a&amp;b"
    assert visible("plain text, with ünïcode") == "plain text, with ünïcode"


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (91.2, (0, 20, 40, 60, 80, 100)),
        (1300, (0, 500, 1000, 1500)),
        (0.42, (0, 0.1, 0.2, 0.3, 0.4, 0.5)),
        (5, (0, 1, 2, 3, 4, 5)),
        (0, (0, 1)),
    ],
)
def test_ticks_are_round_numbers(high: float, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(high) == pytest.approx(ticks)


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_ticks_begin_at_0_and_cover_the_range_with_few_steps(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 6
    assert ticks[-2] < high


@given(st.integers(min_value=64, max_value=1 << 24))
def test_contexts_are_counted_in_powers_of_two(high: int) -> None:
    ticks = token_ticks(high)
    step = ticks[1]
    assert step == 2 ** round(step).bit_length() // 2
    assert ticks[-1] >= high
    assert len(ticks) <= 6


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (512, "512"), (4096, "4K"), (1536, "1.5K"), (1000, "1,000")])
def test_token_labels(value: float, text: str) -> None:
    assert tokens_text(value) == text


def test_tick_labels_have_no_idle_digits() -> None:
    assert [tick_text(value) for value in (0.0, 0.5, 2.25, 1500.0)] == ["0", "0.5", "2.25", "1,500"]


def test_doublings_are_equally_wide() -> None:
    scale = Scale(1, 64, 10, 130, doubling=True)
    assert [scale(value) for value in (1, 2, 4, 64)] == pytest.approx([10, 30, 50, 130])
    assert Scale(3, 3, 0, 100)(3) == 50


def test_crowded_ticks_are_dropped_except_the_last() -> None:
    scale = Scale(0, 100, 0, 100)
    assert thinned([1, 2, 50, 98, 100], scale, 20) == [2, 50, 100]


@given(st.lists(st.floats(min_value=0, max_value=200), max_size=6))
def test_labels_do_not_overlap_and_stay_in_the_plot(wanted: list[float]) -> None:
    found = spread(wanted, 15, 0, 200)
    ordered = sorted(found)
    assert len(found) == len(wanted)
    assert all(high - low >= 15 - 1e-6 for low, high in pairwise(ordered))
    assert all(-1e-6 <= y <= 200 + 1e-6 for y in found)
