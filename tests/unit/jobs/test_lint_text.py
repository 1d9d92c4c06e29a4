"""What changes by itself is found in many spellings, and nothing of a text is lost when it is cut there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.lint.variable_text import (
    Volatile,
    differing,
    differing_marks,
    line_ends_unified,
    marked,
    segments,
    spelled,
)
from tokenmill.jobs.scheduler.prefix_groups import common_length

TIMES = [
    "2026-01-03",
    "2026-01-03 04:05:06",
    "2026-01-03T04:05:06.123456+00:00",
    "2026-01-03T04:05:06Z",
    "2026/1/3 4:05 PM",
    "03.01.2026, 14:05",
    "1/3/26",
    "01-03-2026",
    "Sat, 03 Jan 2026 04:05:06 +0000",
    "Sat Jan  3 04:05:06 2026",
    "Sat Jan 3 04:05:06 UTC 2026",
    "January 3rd, 2026 at 4:05 PM UTC",
    "3 January 2026",
    "03-Jan-2026 04:05",
    "Saturday, January 3, 2026",
    "3rd of January 2026",
    "January 2026",
    "Jan 3",
    "Dec. 3, 2026",
    "2026年1月3日(土) 4時5分",
    "2026년 1월 3일",
    "20260103T040506Z",
    "20260103-040506",
    "20260103",
    "1767413106",
    "1767413106.25",
    "1767413106123",
    "1767413106123456789",
    "04:05:06",
    "4:05 PM",
    "04:05:06,123",
]
IDS = [
    "123e4567-e89b-12d3-a456-426614174000",
    "123E4567-E89B-12D3-A456-426614174000",
    "0x7f3a2b3c4d50",
    "req_8f3aK2",
    "chatcmpl-9aBc123",
    "deadbeef12",
    "01ARZ3NDEKTSV4RRFFQ69G5FAV",
    "V1StGXR8_Z5jdHi6B-myT",
    "job-000017",
    "d41d8cd98f00b204e9800998ecf8427e",
    "session_9f8e7d6c",
]
TEXT = st.text(st.sampled_from("ab1 2\n\r\t-:.,TZ年\u00a0é20JanSat"), max_size=60)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, "timestamp") for text in TIMES),
        *((text, "id") for text in IDS),
        ("17", "number"),
        ("0", "number"),
        ("  ", "whitespace"),
        ("\r\n", "whitespace"),
        ("\u00a0", "whitespace"),
    ],
)
@pytest.mark.parametrize("around", [("It is ", " now"), ("(", ")"), ("", ""), ("今日は", "です"), ("a\n", "\nb")])
def test_one_mark_holds_all_of_it(text: str, kind: Volatile, around: tuple[str, str]) -> None:
    if kind == "whitespace":
        around = ("a", "b")
    found = [mark for mark in marked(around[0] + text + around[1]).marks if mark.kind != "whitespace" or text.isspace()]
    assert [(mark.kind, mark.text) for mark in found] == [(kind, text)]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("the face added decade", []),
        ("a b", []),
        ("version 1.2.3", ["number", "number", "number"]),
        ("row17", ["number"]),
        ("x_17", ["number"]),
        ("Mayor 5", ["number"]),
        ("-2026-01-03", ["timestamp"]),
        ("Jan  x", ["whitespace"]),
        ("½ ² ٣", []),
    ],
)
def test_what_is_no_time_and_no_id(text: str, kinds: list[str]) -> None:
    assert [mark.kind for mark in marked(text).marks] == kinds


@given(TEXT)
def test_nothing_is_lost_by_cutting(text: str) -> None:
    cut = marked(text)
    assert (
        "".join(plain + mark for plain, mark in zip(cut.plain, [*(m.text for m in cut.marks), ""], strict=True)) == text
    )
    assert "".join(segment.text for segment in segments(text)) == text


@given(TEXT)
def test_segments_are_spelled_as_the_whole_is(text: str) -> None:
    cut = marked(text)
    for keep in (None, "timestamp", "id", "number"):
        assert spelled(segments(text), keep) == cut.spelled(keep)


LONG = "First sentence. " * 60 + "Dec. 3, 2026 is a date. Then more.\n    indented\n\nlast " + "word. " * 200


def test_long_lines_are_cut_by_the_sentence_and_dates_stay_whole() -> None:
    found = segments(LONG)
    assert len(found) > 20
    assert "".join(segment.text for segment in found) == LONG
    assert [mark.text for segment in found for mark in segment.marked.marks if mark.kind == "timestamp"] == [
        "Dec. 3, 2026"
    ]
    assert spelled(found) == marked(LONG).spelled()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("at 4:05 go", "at 5:06 go", [("timestamp", 3, 3)]),
        ("a 1 b 2", "a 1 b 3", [("number", 6, 6)]),
        ("a 10 b 2", "a 9 b 3", [("number", 2, 2), ("number", 7, 6)]),
        ("a b", "a  b", [("whitespace", 2, 2)]),
        ("a\r\nb 1", "a\nb 2", [("whitespace", 1, 1), ("number", 5, 4)]),
        ("\na 1", "\n\na 2", [("number", 3, 4)]),
        (" a 1", "a 2", [("number", 3, 2)]),
        ("a 1", "a 1", []),
    ],
)
def test_differences_are_told_in_the_places_of_both(one: str, other: str, expected: list[tuple[str, int, int]]) -> None:
    assert marked(one).spelled() == marked(other).spelled()
    assert list(differing_marks(marked(one), marked(other))) == expected
    assert list(differing(segments(one), segments(other))) == expected


def test_texts_whose_segments_no_longer_pair_are_held_against_each_other_whole() -> None:
    one, other = "Short. " * 90 + "At 4:05.", "Short. " * 89 + "Short.  At 5:06."
    assert len(segments(one)) != len(segments(other))
    assert [kind for kind, _, _ in differing(segments(one), segments(other))] == ["whitespace", "timestamp"]


@given(TEXT, TEXT)
def test_common_beginnings(one: str, other: str) -> None:
    count = common_length(one, other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


@pytest.mark.parametrize(
    ("text", "unified"),
    [("a \t\r\nb\r\n", "a\nb"), ("a\nb", "a\nb"), ("  a\n  b", "  a\n  b"), ("a\rb", "a\nb"), ("a  b \n\n", "a  b")],
)
def test_line_ends_are_made_one_and_indentation_is_kept(text: str, unified: str) -> None:
    assert line_ends_unified(text) == unified
