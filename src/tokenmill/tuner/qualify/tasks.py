"""The tasks of `qualify`, read from tasks.toml: a chronicle to search, JSON and code to write, texts to predict."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tokenmill.decode import read_toml

Language = Literal["Python", "C", "Java", "JavaScript"]
PLACES = (0.05, 0.25, 0.5, 0.75, 0.95)  # relative positions of needles in a document
_SENTENCES = 4  # sentences per paragraph
_COUNTS = range(3, 90)
_NUMBERS = (10_000, 90_000)  # five digits


@dataclass(frozen=True, slots=True)
class Chronicle:
    """Sentence templates and words for their gaps."""

    opening: str
    question: str
    needle: str
    sentences: tuple[str, ...]
    words: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class JsonTask:
    """JSON to write; `shape` is JSON whose values name types."""

    ask: str
    shape: str

    @property
    def wanted(self) -> Any:
        """The shape, parsed."""
        return json.loads(self.shape)


@dataclass(frozen=True, slots=True)
class JsonTasks:
    """All tasks of a kind and their common system message."""

    system: str
    tasks: tuple[JsonTask, ...]


@dataclass(frozen=True, slots=True)
class CodeTask:
    """Code to write."""

    language: Language
    ask: str


@dataclass(frozen=True, slots=True)
class CodeTasks:
    """All tasks of a kind and their common system message."""

    system: str
    tasks: tuple[CodeTask, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """Prompts that are repeated."""

    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text for `agreement`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Asks:
    """The content of tasks.toml."""

    chronicle: Chronicle
    json: JsonTasks
    code: CodeTasks
    again: Again
    texts: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Needle:
    """A sentence hidden in a document, and the question about it."""

    share: float  # share of the document before it
    question: str
    number: str


@dataclass(frozen=True, slots=True)
class SearchPage:
    """A document to search, with its needles."""

    tokens: int  # requested length
    text: str
    needles: tuple[Needle, ...]


@cache
def asks() -> Asks:
    """tasks.toml, read once."""
    with resources.as_file(resources.files("tokenmill.tuner.qualify") / "tasks.toml") as path:
        return read_toml(Asks, Path(path))


def documents(
    depths: Sequence[int], chars_per_token: float, places: Sequence[float] = PLACES
) -> tuple[SearchPage, ...]:
    """One document per depth, shortest first; each begins with the previous one.

    A document has a needle per place, and between them those of the other depths, with other names and numbers.
    """
    chronicle = asks().chronicle
    wanted = sorted((round(share * depth * chars_per_token), depth, share) for depth in depths for share in places)
    found: dict[int, list[Needle]] = {depth: [] for depth in depths}
    pages = [chronicle.opening]
    number = 0
    size = len(chronicle.opening)
    made = []
    for depth in sorted(depths):
        end = round(depth * chars_per_token)
        while size < end or (wanted and wanted[0][0] <= end):
            if wanted and wanted[0][0] <= max(size, 1):
                _, of, share = wanted.pop(0)
                page, needle = _needle(sum(map(len, found.values())), share)
                found[of].append(needle)
            else:
                page = paragraph(number)
                number += 1
            pages.append(page)
            size += len(page) + 1
        made.append(SearchPage(depth, "\n".join(pages), tuple(found[depth])))
    return tuple(made)


def _needle(number: int, share: float) -> tuple[str, Needle]:
    """The sentence and its question."""
    chronicle = asks().chronicle
    name = _name(chronicle.words["places"], number)
    code = str(_NUMBERS[0] + _drawn(name, "number") % _NUMBERS[1])
    words = chronicle.needle.format(place=name, number=code)
    return words, Needle(share, chronicle.question.format(place=name), code)


def paragraph(number: int) -> str:
    """Paragraph `number` of the chronicle, always the same."""
    chronicle = asks().chronicle
    parts = []
    for at in range(_SENTENCES):
        seed = f"{number}-{at}"
        sentence = chronicle.sentences[_drawn(seed, "sentence") % len(chronicle.sentences)]
        words = {slot: options[_drawn(seed, slot) % len(options)] for slot, options in chronicle.words.items()}
        parts.append(sentence.format(**words, count=_COUNTS[_drawn(seed, "count") % len(_COUNTS)]))
    return " ".join(part[0].upper() + part[1:] for part in parts)


def _name(names: Sequence[str], number: int) -> str:
    """A name for each number; names repeat with a prefix."""
    before = ("", "Upper ", "Lower ", "Old ", "New ", "Far ", "West ")[number // len(names) % 7]
    return before + names[number % len(names)]


def _drawn(seed: str, slot: str) -> int:
    """A deterministic pseudo-random number."""
    return int.from_bytes(hashlib.sha256(f"{seed} {slot}".encode()).digest()[:6])
