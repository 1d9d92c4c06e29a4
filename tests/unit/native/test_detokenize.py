"""Bytes to text and stop strings, independent of how the bytes are cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.native.sampling.detokenize import Detokenizer, Stops


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_characters_come_whole(text: str, places: list[int]) -> None:
    made = Detokenizer()
    parts = [made.add(piece) for piece in cut(text.encode(), places)]
    assert "".join(parts) == text
    assert made.end() == ""


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_bytes_that_are_no_text_are_replaced_as_python_does(data: bytes, places: list[int]) -> None:
    made = Detokenizer()
    text = "".join(made.add(piece) for piece in cut(data, places)) + made.end()
    assert text == data.decode(errors="replace")


def test_half_a_character_is_held_back_and_shown_at_the_end() -> None:
    made = Detokenizer()
    assert made.add("né".encode()[:2]) == "n"
    assert made.end() == "�"


def plain(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text


letters = st.text(alphabet="abc", max_size=40)


@given(st.lists(letters), st.lists(st.text(alphabet="abc", max_size=4), max_size=4))
def test_parts_together_are_the_text_before_the_first_stop(parts: list[str], stops: list[str]) -> None:
    made = Stops(stops)
    shown, met = [], False
    for part in parts:
        ready, met = made.add(part)
        shown.append(ready)
        if met:
            break
    assert met == made.met
    shown.append(made.end())
    taken = "".join(parts[: len(shown) - 1]) if met else "".join(parts)
    assert "".join(shown) == plain(taken, stops)
    assert met == any(stop and stop in taken for stop in stops)


@given(st.lists(letters), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_only_the_beginning_of_a_stop_is_held_back(parts: list[str], stops: list[str]) -> None:
    made = Stops(stops)
    taken = shown = ""
    for part in parts:
        ready, met = made.add(part)
        if met:
            return
        taken, shown = taken + part, shown + ready
        held = taken[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("parts", "stops", "shown"),
    [
        (["one\nUs", "er: two"], ["\nUser:"], ["one", ""]),
        (["one\nUs", "ing two"], ["\nUser:"], ["one", "\nUsing two"]),
        (["aab"], ["ab", "b"], ["a"]),
        (["xEND", "more"], ["END"], ["x", ""]),
        (["abc"], [], ["abc"]),
        (["abc"], [""], ["abc"]),
    ],
)
def test_when_text_is_released(parts: list[str], stops: list[str], shown: list[str]) -> None:
    made = Stops(stops)
    assert [made.add(part)[0] for part in parts] == shown


def test_after_a_stop_nothing_comes() -> None:
    made = Stops(["."])
    assert made.add("a. b") == ("a", True)
    assert made.add("c") == ("", True)
    assert made.end() == ""
