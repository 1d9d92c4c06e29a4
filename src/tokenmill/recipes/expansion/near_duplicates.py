"""Finds near-duplicate texts with MinHash.

A text is the set of its shingles: three consecutive words or, in short texts and scripts without spaces, four
characters (there two). Texts of medium length have both, so that one word more or less does not separate similar
texts. Permutations are fixed and texts are compared in order: equal texts give equal results everywhere.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.version import install_hint

PERMUTATIONS = 128  # standard error of about 0.035 at a similarity of 0.8
WORDS = 3
LETTERS = 4
SYMBOLS = 2  # a Chinese word has about two characters
FEW_WORDS = 8  # number of words from which words are compared
MANY_WORDS = 16  # number of words from which characters are not compared
_SEED = 1
_LOOSER = 0.95  # factor for the index's threshold: the index misses candidates close to it, and cannot be built for 1
_DENSE_SHARE = 0.3  # share of such letters from which a text counts as one without spaces
_WORD = re.compile(r"\w+")
# Scripts without spaces: Thai, Lao, Tibetan, Burmese, Khmer; kana, bopomofo, Han, and Han beyond the first plane.
_DENSE = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)

ShingleKind = Literal["words", "letters", "symbols"]


@dataclass(frozen=True, slots=True)
class SimilarText:
    """An earlier text and its similarity, 0 to 1."""

    name: str
    similarity: float


class NearDuplicates:
    """An index of texts for one similarity threshold."""

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise UsageError(
                f"the similarity of near-duplicates must be above 0 and at most 1 (got {threshold:g})",
                hint="0.8 finds texts that share 80 % of their shingles, 1 only equal texts",
            )
        self._threshold = threshold
        self._library = _library()
        self._blank = self._library.MinHash(num_perm=PERMUTATIONS, seed=_SEED)
        self._indexes: dict[ShingleKind, Any] = {}
        self._minhashes: dict[tuple[ShingleKind, str], Any] = {}

    def find(self, text: str) -> SimilarText | None:
        """The most similar added text with at least the threshold, the first of equal ones; None: no such text."""
        best: SimilarText | None = None
        for kind, shingles in kinds_of(text):
            if kind not in self._indexes:
                continue
            minhash = self._minhash(shingles)
            names = self._indexes[kind].query(minhash)
            # Candidates are unordered and may be below the threshold.
            for similarity, name in sorted(
                (-float(self._minhashes[kind, name].jaccard(minhash)), name) for name in names
            ):
                if -similarity >= self._threshold and (best is None or -similarity > best.similarity):
                    best = SimilarText(name, -similarity)
        return best

    def add(self, name: str, text: str) -> None:
        """Add a text under a unique name."""
        for kind, shingles in kinds_of(text):
            if kind not in self._indexes:
                self._indexes[kind] = self._library.MinHashLSH(
                    num_perm=PERMUTATIONS, params=_bands(_LOOSER * self._threshold)
                )
            minhash = self._minhashes[kind, name] = self._minhash(shingles)
            self._indexes[kind].insert(name, minhash)

    def _minhash(self, shingles: set[str]) -> Any:
        minhash = self._blank.copy()  # generating the permutations is the slowest part
        minhash.update_batch([shingle.encode() for shingle in shingles])
        return self._library.LeanMinHash(minhash)


def kinds_of(text: str) -> Iterator[tuple[ShingleKind, set[str]]]:
    """The one or two shingle sets by which a text is compared."""
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


@lru_cache(8)  # the search for bands takes 0.1 s
def _bands(threshold: float) -> tuple[int, int]:
    """Bands and rows of an index with few misses; false candidates are rejected later."""
    index = _library().MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
    return index.b, index.r


def _library() -> Any:
    try:
        import datasketch  # noqa: PLC0415  an extra, and slow to import
    except ImportError:
        raise TokenmillError(
            "finding near-duplicates needs the package datasketch, which is not installed",
            hint=install_hint("recipes"),
        ) from None
    return datasketch
