"""How often other work in a batch changes the greedy answer of a sequence, through rounding alone.

    python bench/batch_width.py [--prompts 12] [--tokens 40] [--threads 1]

SmolLM2 answers every prompt greedily, first alone, then with others in its batches in three ways: decoded together,
also prefilled together, and alone with a chunk of another prompt in the batches of its first tokens. There is no
randomness: a different answer means that the two best tokens were so close that the order of additions decided. Running
alone again is the control. Writes results/batch_width.json.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from tokenmill.config import Config
from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost
from tokenmill.model.pull import pull
from tokenmill.native.llama.context import Decoded, LlamaContext
from tokenmill.native.llama.library import open_running
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.units import GIB

STRANGER = 8  # the sequence of the additional prompt
SUBJECTS = (
    "a river",
    "bread",
    "the moon",
    "a bicycle",
    "rain",
    "an old clock",
    "salt",
    "a lighthouse",
    "snow",
    "a harbour",
    "glass",
    "a windmill",
    "honey",
    "the desert",
    "a violin",
    "paper",
    "thunder",
    "a garden",
    "iron",
    "a map",
    "tea",
    "a bridge",
    "wool",
    "the sea",
)
ASKED = ("Tell me something about {}.", "Write two sentences that describe {}.", "Why do people care about {}?")


@dataclass(frozen=True)
class Row:
    """A part of one sequence in a batch."""

    sequence: int
    tokens: list[int]
    position: int
    logits: bool = True


@dataclass(frozen=True)
class Way:
    """How the sequences are computed."""

    name: str
    width: int = 1  # sequences decoded together
    together: bool = False  # whether their prompts are prefilled in one batch
    strangers: int = 0  # tokens of another prompt in the batches of its first decodes
    flash_attention: bool = True


WAYS = (
    Way("alone, again"),
    Way("2 decoded together", 2),
    Way("4 decoded together", 4),
    Way("8 decoded together", 8),
    Way("8 prefilled and decoded together", 8, together=True),
    Way("beside a chunk of 128 tokens", strangers=128),
    Way("8 prefilled and decoded together, no flash attention", 8, together=True, flash_attention=False),
    Way("beside a chunk of 128 tokens, no flash attention", strangers=128, flash_attention=False),
)
BESIDE = 2  # decodes with a chunk in their batch


@dataclass(frozen=True)
class Outcome:
    """Differences between one way and the answers computed alone."""

    way: str
    answers: int
    different: int
    first_difference: int | None  # median position of the first different token
    gap: float | None  # median distance of the two best logits there, when computed alone


def answers(
    context: LlamaContext, prompts: list[list[int]], way: Way, tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers, and the difference of the two best logits at each token."""
    found: list[list[int]] = []
    gaps: list[list[float]] = []
    for start in range(0, len(prompts), way.width):
        group = prompts[start : start + way.width]
        drawn: list[list[int]] = [[] for _ in group]
        gap: list[list[float]] = [[] for _ in group]
        context.clear()
        first = [Row(number, prompt, 0) for number, prompt in enumerate(group)]
        rows = []
        for batch in [first] if way.together else [[row] for row in first]:
            rows += step(context, batch, drawn, gap)
        for turn in range(tokens - 1):
            beside = []
            if way.strangers and turn < BESIDE:
                words = [1000 + (start + turn + place) % 5000 for place in range(way.strangers)]
                beside = [Row(STRANGER, words, turn * way.strangers, False)]
            rows = step(context, rows, drawn, gap, beside)
        found += drawn
        gaps += gap
    return found, gaps


def step(
    context: LlamaContext, rows: list[Row], drawn: list[list[int]], gap: list[list[float]], beside: Sequence[Row] = ()
) -> list[Row]:
    """Compute a batch and sample the most likely tokens; returns the rows of the next batch."""
    if context.decode([*rows, *beside]) is not Decoded.OK:
        raise SystemExit("the context is too small")
    place = -1
    following = []
    for row in rows:
        place += len(row.tokens)
        logits = context.logits(place)
        second, best = np.partition(logits, -2)[-2:]
        token = int(logits.argmax())
        drawn[row.sequence].append(token)
        gap[row.sequence].append(float(best - second))
        following.append(Row(row.sequence, [token], row.position + len(row.tokens)))
    return following


def compare(way: Way, alone: list[list[int]], gaps: list[list[float]], found: list[list[int]]) -> Outcome:
    """Compare the answers of a way with those computed alone."""
    firsts = []
    for one, other, gap in zip(alone, found, gaps, strict=True):
        first = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            firsts.append((first, gap[first]))
    return Outcome(
        way.name,
        len(alone),
        len(firsts),
        round(median(at for at, _ in firsts)) if firsts else None,
        round(median(gap for _, gap in firsts), 3) if firsts else None,
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="more threads wait for each other on a busy machine")
    asked = parser.parse_args()
    path = pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
    library = open_running()
    model = LlamaModel.load(library, path, ModelSettings())
    texts = [ASKED[number % 3].format(SUBJECTS[number % len(SUBJECTS)]) for number in range(asked.prompts)]
    prompts = [
        list(model.vocab.tokenize(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")) for text in texts
    ]
    outcomes = []
    for flash_attention in (True, False):
        settings = ContextSettings(
            cells=2048,
            context=256,
            sequences=STRANGER + 1,
            threads=asked.threads,
            threads_batch=asked.threads,
            flash_attention=flash_attention,
        )
        context = LlamaContext(model, settings)
        alone, gaps = answers(context, prompts, Way("alone"), asked.tokens)
        for way in (way for way in WAYS if way.flash_attention == flash_attention):
            found, _ = answers(context, prompts, way, asked.tokens)
            outcomes.append(last := compare(way, alone, gaps, found))
            print(f"{last.way}: {last.different} of {last.answers}, at token {last.first_difference}, gap {last.gap}")
        context.close()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": path.name,
        "build": f"llama.cpp {library.version}",
        "machine": f"{read_cpu(LocalHost())[0].model or platform.machine()}, {asked.threads} threads",
        "tokens": asked.tokens,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    target = Path(__file__).parent / "results" / "batch_width.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    model.close()


if __name__ == "__main__":
    main()
