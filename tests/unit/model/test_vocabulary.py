"""Vocabularies contain every byte, only usable merges, and no duplicates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.model import catalog
from tokenmill.model.synthetic import vocabulary

SPECIAL = {"<a>": 0, "<b>": 5}


def test_the_alphabet_has_a_letter_for_each_byte() -> None:
    letters = vocabulary.byte_alphabet()
    assert len(set(letters)) == 256
    assert letters[ord("A")] == "A"
    assert letters[ord(" ")] == "Ġ"
    assert letters[ord("\n")] == "Ċ"
    assert not any(letter.isspace() for letter in letters)


@given(size=st.integers(vocabulary.min_size(SPECIAL), 30_000), speakable=st.booleans())
def test_any_size_gives_distinct_tokens_and_merges_whose_halves_come_first(size: int, speakable: bool) -> None:
    made = vocabulary.build(size, SPECIAL, speakable=speakable)
    assert len(made.tokens) == len(made.types) == len(set(made.tokens)) == size
    assert (made.tokens[0], made.tokens[5], made.types[0], made.types[5]) == ("<a>", "<b>", 3, 3)
    known = set(vocabulary.byte_alphabet())
    assert known < set(made.tokens)
    for merge in made.merges:
        left, right = merge.split(" ")
        assert left in known
        assert right in known
        known.add(left + right)
    assert known <= set(made.tokens)


def test_a_placeholder_marks_its_filler_unused_and_a_speakable_one_has_none() -> None:
    assert vocabulary.build(2000, SPECIAL).types.count(5) > 1500
    assert 5 not in vocabulary.build(2000, SPECIAL, speakable=True).types
    assert 5 not in vocabulary.build(150_000, SPECIAL, speakable=True).types


def test_every_english_merge_is_used() -> None:
    assert len(vocabulary.build(1000, {}).merges) == vocabulary._ENGLISH.count("|") + 1


@pytest.mark.parametrize("name", catalog.names())
def test_special_tokens_stand_where_the_model_has_them(name: str) -> None:
    words = catalog.entry(name).model.words
    made = vocabulary.build(words.tokens, words.special)
    assert {made.tokens[place]: place for place in words.special.values()} == words.special
