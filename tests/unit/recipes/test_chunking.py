"""Splitting of texts: boundaries, limits, overlap; no text is lost."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.recipes.summarization.chunking import estimate, fits, groups, halved, headings, split

PROSE = "The mill stands by the river. It has two wheels! Who built it? Nobody knows.\n\n"
TEXTS = st.text(st.sampled_from("ab é\n.#=-`漢😀\u0301\u200d。 "), max_size=400) | st.text(max_size=200)


def words(text: str) -> int:
    return len(text.split())


@given(TEXTS, st.integers(1, 40))
def test_pieces_concatenate_to_the_text_within_the_limit(text: str, room: int) -> None:
    pieces = split(text, room, len)
    assert "".join(pieces) == text
    assert all(len(piece) <= room for piece in pieces)
    assert all(pieces) or text == ""


@given(TEXTS, st.integers(4, 40))
def test_pieces_with_tokens_of_several_bytes(text: str, room: int) -> None:
    pieces = split(text, room, estimate)
    assert "".join(pieces) == text
    # Estimates are rounded up, so the tokens of a piece never exceed the sum of its parts.
    assert all(estimate(piece) <= room for piece in pieces)


@given(TEXTS, st.integers(8, 40), st.integers(1, 4))
def test_a_piece_repeats_the_end_of_its_predecessor(text: str, room: int, overlap: int) -> None:
    pieces, plain = split(text, room, len, overlap=overlap), split(text, room - overlap, len)
    if len(text) <= room:
        assert pieces == (text,)
        return
    assert len(pieces) == len(plain)
    for number in range(1, len(pieces)):
        repeated = pieces[number].removesuffix(plain[number])
        assert len(repeated) <= overlap
        assert plain[number - 1].endswith(repeated)


def test_combining_characters_stay_together() -> None:
    text = "e\u0301" * 50 + "👩\u200d🚀" * 20 + "👍🏽" * 20
    for piece in split(text, 7, len):
        assert not unicodedata.combining(piece[0])
        assert piece[0] not in "\u200d🏽"
        assert not piece.endswith("\u200d")


@pytest.mark.parametrize(
    ("text", "room", "cuts"),
    [
        pytest.param("# A\nx x x\n# B\ny y y\n", 5, ["# A", "# B"], id="headings"),
        pytest.param("# A\nx\n## C\nx x x x\n## D\nx x x x\n# B\ny\n", 9, ["# A", "## D"], id="inner headings"),
        pytest.param("One two three.\n\nFour five six.\n\nSeven eight nine.", 6, ["One", "Seven"], id="paragraphs"),
        pytest.param("One two three. Four five six. Seven eight. ", 5, ["One", "Four"], id="sentences"),
        pytest.param("a b c\nd e f\ng h i", 4, ["a", "d", "g"], id="lines"),
        pytest.param("a b c d e f", 4, ["a", "d"], id="words"),
    ],
)
def test_texts_are_cut_at_natural_boundaries(text: str, room: int, cuts: list[str]) -> None:
    pieces = split(text, room, words)
    assert "".join(pieces) == text
    assert len(pieces) == len(cuts)
    assert all(piece.startswith(cut) for piece, cut in zip(pieces, cuts, strict=True))


def test_pieces_have_similar_lengths() -> None:
    text = "".join(f"Sentence number {number} is here. " for number in range(42))
    sizes = [words(piece) for piece in split(text, 200, words)]
    assert sizes == [105, 105]


def test_headings_of_markdown_and_rest() -> None:
    text = "Title\n=====\n\nText\n\nPart\n----\n\n```\n# a comment\n```\n\n### Deep\n\n| a |\n|---|\n\nOver\n~~~~\n"
    assert [(text[offset:].split("\n", maxsplit=1)[0], rank) for offset, rank in headings(text)] == [
        ("Title", 1),
        ("Part", 2),
        ("### Deep", 3),
        ("Over", 3),
    ]


def test_a_horizontal_rule_is_not_a_heading() -> None:
    assert headings("One\ntwo\n---\nthree\n\n---\n\nfour") == []


def test_a_long_text_without_boundaries_is_cut_quickly() -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return -(-len(text) // 3)

    text = "x" * 300_000
    pieces = split(text, 1000, count)
    assert "".join(pieces) == text
    assert max(map(count, pieces)) <= 1000
    assert len(pieces) < 115
    assert counted < 60 * len(text)


def test_a_short_text_is_not_counted() -> None:
    def count(_text: str) -> int:
        raise AssertionError

    assert fits("short", 20, count)


@given(st.text(min_size=2, max_size=200))
def test_halves_are_shorter_and_lose_nothing(text: str) -> None:
    parts = halved(text, len)
    assert "".join(parts) == text
    assert len(parts) >= 2
    assert max(map(len, parts)) < len(text)


def test_a_single_character_cannot_be_halved() -> None:
    assert halved("x", len) == ("x",)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_groups_hold_all_neighbours_and_fit(sizes: list[int], room: int) -> None:
    made = groups(sizes, room)
    assert sum(made) == len(sizes)
    start = 0
    for size in made:
        assert sum(sizes[start : start + size]) <= room
        start += size
    assert len(made) <= max(1, 2 * -(-sum(sizes) // room)) or not sizes


def test_a_text_of_many_paragraphs_is_cut_between_them() -> None:
    for piece in split(PROSE * 100, 200, words):
        assert re.match(r"The mill", piece)
        assert piece.endswith("\n\n")


@pytest.mark.parametrize(("room", "overlap"), [(0, 0), (5, 5), (5, -1)])
def test_invalid_sizes_are_refused(room: int, overlap: int) -> None:
    with pytest.raises(ValueError, match=f"{room} with overlap {overlap}"):
        split("text", room, len, overlap=overlap)
