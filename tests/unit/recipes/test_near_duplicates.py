"""Near-duplicates: similar and different texts, and deterministic results."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.near_duplicates import FEW_WORDS, MANY_WORDS, NearDuplicates, kinds_of

LONG = (
    "The sluice of a watermill lets more or less water onto the wheel and so the miller sets how fast the stones turn "
    "while the grain runs from the hopper between them and comes out at the rim as flour that is bolted and bagged "
    "before the carts arrive in the morning to bring it to the bakers of the town below the hill"
)


def near(*texts: str, threshold: float = 0.8) -> NearDuplicates:
    found = NearDuplicates(threshold)
    for number, text in enumerate(texts, 1):
        found.add(f"text-{number}", text)
    return found


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Grind it.", ["letters"]),
        ("", ["letters"]),
        ("!?", ["letters"]),
        (" ".join(["word"] * FEW_WORDS), ["words", "letters"]),
        (LONG, ["words"]),
        ("水車小屋では小麦を石臼で挽きます。", ["symbols"]),
        ("โรงสีข้าวอยู่ใกล้แม่น้ำ", ["symbols"]),
        ("The word 水 means water, and it is the only Chinese word in this long English sentence here.", ["words"]),
    ],
)
def test_shingles_of_texts(text: str, kinds: list[str]) -> None:
    assert [kind for kind, _ in kinds_of(text)] == kinds


@pytest.mark.parametrize(
    ("known", "new"),
    [
        (LONG, LONG),
        (LONG, LONG.upper() + " !!"),
        (LONG, LONG.replace("before the carts", "until the carts")),
        (LONG, LONG.replace(" and bagged", "")),
        ("Name three grains.", "name three grains"),
        (
            "How do millers store their grain safely?",
            "How do millers store their own grain safely?",
        ),  # seven and eight words
        ("ｆｕｌｌ ｗｉｄｔｈ", "full width"),
        ("水車小屋では小麦を石臼で挽いて粉にします。", "水車小屋では、小麦を石臼で挽いて粉にします"),
    ],
)
def test_near_duplicates_are_found(known: str, new: str) -> None:
    found = near("Something else entirely stands here.", known, threshold=0.7).find(new)
    assert found is not None
    assert found.name == "text-2"
    assert found.similarity >= 0.7


@pytest.mark.parametrize(
    ("known", "new"),
    [
        (LONG, " ".join(reversed(LONG.split()))),
        (LONG, LONG[: len(LONG) // 2]),
        ("Name three grains.", "Name four rivers."),
        ("水車小屋では小麦を石臼で挽きます。", "川の向こうに古い橋があります。"),
        ("Say what a mill is.", "水車小屋では小麦を石臼で挽きます。"),
        ("?", "!"),
    ],
)
def test_different_texts_are_not_found(known: str, new: str) -> None:
    assert near(known).find(new) is None


def test_the_most_similar_text_is_found_first_of_equal_ones() -> None:
    other = LONG.replace("carts", "wagons").replace("town", "village")
    assert near(other, LONG, LONG).find(LONG) == near(other, LONG).find(LONG)
    found = near(other, LONG, LONG).find(LONG)
    assert found is not None
    assert (found.name, found.similarity) == ("text-2", 1.0)


def test_a_threshold_of_one_finds_only_equal_texts() -> None:
    found = near(LONG, threshold=1.0)
    assert found.find(LONG) is not None
    assert found.find(LONG.replace("carts", "wagons")) is None


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.01])
def test_an_invalid_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match=f"{threshold:g}"):
        NearDuplicates(threshold)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=80), min_size=1, max_size=6, unique=True))
def test_every_text_is_found_and_results_are_deterministic(texts: list[str]) -> None:
    first, second = near(*texts), near(*texts)
    for text in texts:
        found = first.find(text)
        assert found is not None
        assert found.similarity == 1.0
        assert second.find(text) == found


def test_texts_of_medium_length_are_compared_in_two_ways() -> None:
    assert FEW_WORDS < MANY_WORDS
