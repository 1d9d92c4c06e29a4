"""Builds byte-level BPE vocabularies: placeholders for ghosts, and speakable ones for synthetic models.

All vocabularies contain the 256 byte tokens, so that any text can be tokenized, then merges of common English pairs
and, in placeholders, tokens marked as unused. They copy no published vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama.cpp's token types
_SPACE = "Ġ"  # a space in byte-level BPE

# common English pairs; halves come before the pairs that contain them
_ENGLISH = (
    "Ġ t|h e|i n|e r|a n|Ġ a|o n|r e|Ġ s|a t|e n|o r|Ġ w|Ġ o|o u|i s|i t|n d|Ġ c|e s|Ġ b|Ġ p|e d|Ġ f|a r|Ġ m|a l|"
    "Ġt he|in g|Ġ d|Ġo f|Ġ in|an d|Ġ h|Ġa nd|Ġt o|o m|Ġ l|i c|l e|Ġ n|a s|Ġb e|Ġ g|s t|i on|Ġ re|l l|en t|Ġ is|v e|"
    "Ġ e|r o|ou t|Ġ on|o t|Ġf or|a y|u t|Ġ I|i l|c t|Ġ y|Ġy ou|i d|e l|Ġw e|Ġc on|Ġ it|Ġw as"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts, their types, and merges."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in byte order."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def build(size: int, special: Mapping[str, int], *, speakable: bool = False) -> Vocabulary:
    """Build a vocabulary of `size` tokens: special tokens at their ids, then bytes and merges at the other ids.

    With `speakable`, syllables and words take the ids that would be unused, so that a model with random weights
    generates text.
    """
    texts: list[str | None] = [None] * size
    types = [_UNUSED] * size
    for text, place in special.items():
        texts[place], types[place] = text, _CONTROL
    free = iter([place for place in range(size) if texts[place] is None])
    known: set[str] = set()
    merges: list[str] = []
    for letter in byte_alphabet():
        place = next(free)
        texts[place], types[place] = letter, _NORMAL
        known.add(letter)
    for left, right in _pairs(speakable=speakable):
        if left + right in known:
            continue
        found = next(free, None)
        if found is None:
            break
        texts[found], types[found] = left + right, _NORMAL
        known.add(left + right)
        merges.append(f"{left} {right}")
    filled = [f"unused {place:x}" if text is None else text for place, text in enumerate(texts)]
    return Vocabulary(filled, types, merges)


def min_size(special: Mapping[str, int]) -> int:
    """Minimum size of a vocabulary with these special tokens, all bytes and one merge."""
    return max(256 + len(special) + 1, max(special.values(), default=0) + 1)


def _pairs(*, speakable: bool) -> Iterator[tuple[str, str]]:
    """Merges by rank; both halves of a merge are letters or earlier merges."""
    for merge in _ENGLISH.split("|"):
        left, _, right = merge.partition(" ")
        yield left, right
    if not speakable:
        return
    syllables = [onset + vowel for onset, vowel in product("bcdfghjklmnpqrstvwxz", "aeiou")]
    yield from ((syllable[0], syllable[1]) for syllable in syllables)
    yield from ((_SPACE, syllable) for syllable in syllables)
    yield from product(syllables, repeat=2)
    yield from product([_SPACE + syllable for syllable in syllables], syllables)
    yield from ((first + second, third) for first, second, third in product(syllables, repeat=3))
