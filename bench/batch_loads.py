"""The loads of the batch benchmark: four kinds of job files, with new texts in every round.

Each round has its own texts, so that nothing is cached from an earlier round; within a round all ways get the same
file. Lengths are in words of a list that the vocabularies of both models cut into about the same number of tokens.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.jobs.layout import lay_out
from tokenmill.jobs.table import Table
from tokenmill.jobs.template import read_template

WORDS = [
    "river",
    "bread",
    "moon",
    "wheel",
    "rain",
    "clock",
    "salt",
    "tower",
    "snow",
    "harbour",
    "glass",
    "mill",
    "honey",
    "desert",
    "violin",
    "paper",
    "thunder",
    "garden",
    "iron",
    "map",
    "tea",
    "bridge",
    "wool",
    "sea",
    "letter",
    "stone",
    "market",
    "winter",
    "lamp",
    "bird",
    "road",
    "copper",
    "window",
    "field",
    "ship",
    "rope",
    "candle",
    "forest",
    "horse",
    "island",
    "bell",
    "grain",
    "smoke",
    "cloth",
    "mirror",
    "valley",
    "hammer",
    "spring",
    "ladder",
    "orchard",
    "well",
    "boat",
    "cellar",
    "chimney",
]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the loads of a model; words are about tokens times `words_per_token`."""

    jobs: int  # twice as many if all share one digest
    alone_jobs: int  # jobs that share nothing: enough for each slot to have several
    digest_tokens: int
    tail_tokens: int
    alone_tokens: int  # words of a prompt that shares nothing
    output_tokens: int
    words_per_token: float = 1.0  # words per token of the model's vocabulary

    def words(self, tokens: int) -> int:
        """Words with about this number of tokens."""
        return max(4, round(tokens * self.words_per_token))


Line = dict[str, Any]
Make = Callable[[Size, random.Random], Iterator[list[dict[str, str]]]]


def _text(words: int, chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def _asked(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _digests(count: int) -> Make:
    def make(size: Size, chance: random.Random) -> Iterator[list[dict[str, str]]]:
        heads = [_text(size.words(size.digest_tokens), chance) for _ in range(count)]
        order = [heads[number % count] for number in range(size.jobs if count > 1 else 2 * size.jobs)]
        chance.shuffle(order)
        for head in order:
            yield _asked(head, _text(size.words(size.tail_tokens), chance))

    return make


def _table(size: Size, chance: random.Random) -> Iterator[list[dict[str, str]]]:
    """Rows of five columns: two with few long values, two with few short ones, one that differs in each row.

    The columns are in the order that shares most; the rows are shuffled.
    """
    plans = [_text(size.words(size.digest_tokens // 3), chance) for _ in range(3)]
    places = [_text(size.words(size.digest_tokens // 6), chance) for _ in range(4)]
    kinds = [_text(3, chance) for _ in range(4)]
    grades = [_text(2, chance) for _ in range(3)]
    rows = tuple(
        (
            _text(size.words(size.tail_tokens // 2), chance),
            chance.choice(grades),
            chance.choice(places),
            chance.choice(kinds),
            chance.choice(plans),
        )
        for _ in range(size.jobs)
    )
    table = Table("rows", ("note", "grade", "place", "kind", "plan"), rows)
    template = read_template("{*}", _text(size.words(size.tail_tokens), chance))
    for line in lay_out(table, template, mode="auto", rows="table"):
        yield json.loads(line)["messages"]


def _alone(size: Size, chance: random.Random) -> Iterator[list[dict[str, str]]]:
    for _ in range(size.alone_jobs):
        yield [{"role": "user", "content": _text(size.words(size.alone_tokens), chance)}]


LOADS: dict[str, Make] = {
    "one digest": _digests(1),
    "four digests shuffled": _digests(4),
    "template table": _table,
    "no sharing": _alone,
}


def write(path: Path, load: str, size: Size, seed: str) -> list[Line]:
    """Write the job file of one round; returns its lines."""
    chance = random.Random(f"{load} {seed}")
    fixed = {"max_tokens": size.output_tokens, "temperature": 0, "ignore_eos": True}
    lines: list[Line] = [
        {"custom_id": f"{number}", "messages": messages, **fixed}
        for number, messages in enumerate(LOADS[load](size, chance))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines
