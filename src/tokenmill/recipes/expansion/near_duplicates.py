"""Near-duplicates of texts by MinHash: what says nearly the same in nearly the same words.

A text is the set of its shingles: three words that follow each other or, in short texts and in scripts that have no
blanks between words, four characters (two there). Texts of middling length have both, so that a word more or less does
not part two that are alike. Permutations are fixed and texts are compared in the order they come: the same texts give
the same verdicts in every run and on every machine. What the texts are is not known here.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tokenmill.errors import TokenmillError, UsageError

PERMUTATIONS = 128  # a similarity of 0.8 is estimated to about 0.035
WORDS = 3
LETTERS = 4
SYMBOLS = 2  # a word of Chinese has about two characters
FEW_WORDS = 8  # from here on words are compared
MANY_WORDS = 16  # from here on characters are not
_SEED = 1
_LOOSER = 0.95  # the index misses some that are just alike enough; at 1 it could not be made at all
_DENSE_SHARE = 0.3
_WORD = re.compile(r"\w+")
# Thai, Lao, Tibetan, Burmese, Khmer; kana, bopomofo, Han, and Han beyond the first plane.
_DENSE = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)

ShingleKind = Literal["words", "letters", "symbols"]


@dataclass(frozen=True, slots=True)
class Likeness:
    """A text that came before, and how much of it two have in common, 0 to 1."""

    name: str
    similarity: float


class Near:
    """Texts that were seen, for one threshold."""

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise UsageError(
                f"near-duplicates are told by a similarity above 0 and up to 1, not {threshold:g}",
                hint="0.8 drops what shares four fifths; 1 only what is the same",
            )
        self._threshold = threshold
        self._library = _library()
        self._blank = self._library.MinHash(num_perm=PERMUTATIONS, seed=_SEED)
        self._indexes: dict[ShingleKind, Any] = {}
        self._sketches: dict[tuple[ShingleKind, str], Any] = {}

    def like(self, text: str) -> Likeness | None:
        """The most alike of the texts that were added, where one is alike enough; of equals the first."""
        best: Likeness | None = None
        for kind, shingles in kinds_of(text):
            if kind not in self._indexes:
                continue
            sketch = self._sketch(shingles)
            names = self._indexes[kind].query(sketch)
            # Buckets give candidates in no order, and some that are not alike enough.
            for similarity, name in sorted(
                (-float(self._sketches[kind, name].jaccard(sketch)), name) for name in names
            ):
                if -similarity >= self._threshold and (best is None or -similarity > best.similarity):
                    best = Likeness(name, -similarity)
        return best

    def add(self, name: str, text: str) -> None:
        """Remember a text; a name stands for one."""
        for kind, shingles in kinds_of(text):
            if kind not in self._indexes:
                self._indexes[kind] = self._library.MinHashLSH(
                    num_perm=PERMUTATIONS, params=_bands(_LOOSER * self._threshold)
                )
            sketch = self._sketches[kind, name] = self._sketch(shingles)
            self._indexes[kind].insert(name, sketch)

    def _sketch(self, shingles: set[str]) -> Any:
        sketch = self._blank.copy()  # drawing the permutations anew takes longer than the rest
        sketch.update_batch([shingle.encode() for shingle in shingles])
        return self._library.LeanMinHash(sketch)


def kinds_of(text: str) -> Iterator[tuple[ShingleKind, set[str]]]:
    """The sets of shingles that a text is compared by: one or two."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = _WORD.findall(plain)
    joined = " ".join(words) or plain.strip()
    letters = sum(map(str.isalnum, joined))
    if letters and len(_DENSE.findall(joined)) >= _DENSE_SHARE * letters:
        yield "symbols", _runs(joined.replace(" ", ""), SYMBOLS)
        return
    if len(words) >= FEW_WORDS:
        yield "words", {" ".join(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}
    if len(words) < MANY_WORDS:
        yield "letters", _runs(joined, LETTERS)


def _runs(text: str, length: int) -> set[str]:
    return {text[at : at + length] for at in range(max(1, len(text) - length + 1))}


@lru_cache(8)  # they are found by trying all, a tenth of a second
def _bands(threshold: float) -> tuple[int, int]:
    """Bands and rows of an index. Few that are alike are to be missed: those that are not are told apart afterwards."""
    index = _library().MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
    return index.b, index.r


def _library() -> Any:
    try:
        import datasketch  # noqa: PLC0415  an extra, and slow to import
    except ImportError:
        raise TokenmillError(
            "near-duplicates are found with datasketch, which is not installed", hint="pip install 'tokenmill[recipes]'"
        ) from None
    return datasketch
