"""How often the number of sequences in a batch changes a greedy answer, through rounding alone.

    python bench/batch_width.py [--prompts 24] [--tokens 48] [--threads 1]

Every prompt is answered greedily by SmolLM2 with 1, 2, 4 and 8 sequences in each batch, prefilled together and decoded
together. No randomness is left: a different answer means that two tokens stood so close that the order of additions
inside a matrix product decided between them. Width 1 twice is the control. Writes results/batch_width.json.
"""

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from tokenmill.config import Config
from tokenmill.engine.engine import Sampling
from tokenmill.engine.native.context import Context, ContextSettings, Decoded
from tokenmill.engine.native.model import Model, ModelSettings
from tokenmill.engine.native.running import open_running
from tokenmill.engine.native.sampling import Sampler
from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost
from tokenmill.model.pull import pull
from tokenmill.units import GIB

WIDTHS = (1, 2, 4, 8)
SUBJECTS = ("a river", "bread", "the moon", "a bicycle", "rain", "an old clock", "salt", "a lighthouse", "snow",
            "a harbour", "glass", "a windmill", "honey", "the desert", "a violin", "paper", "thunder", "a garden", "iron", "a map",
            "tea", "a bridge", "wool", "the sea")  # fmt: skip
ASKED = ("Tell me something about {}.", "Write two sentences that describe {}.", "Why do people care about {}?")


@dataclass(frozen=True)
class Row:
    """A piece of one sequence."""

    sequence: int
    tokens: list[int]
    position: int
    logits: bool = True


@dataclass(frozen=True)
class Width:
    """What one width did to the answers, against width 1."""

    width: int
    answers: int
    different: int
    first_difference: int | None  # median place of the first other token
    least_gap: float | None  # median distance of the two best logits there, as width 1 saw it

    @property
    def share(self) -> float:
        """Of answers that differ."""
        return self.different / self.answers


def answers(
    context: Context, prompts: list[list[int]], width: int, tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers with so many sequences at once, and the gap between the two best logits at each token."""
    sampler = Sampler(context.model.vocab, Sampling(temperature=0))
    found, gaps = [], []
    for start in range(0, len(prompts), width):
        group = prompts[start : start + width]
        context.clear()
        drawn: list[list[int]] = [[] for _ in group]
        gap: list[list[float]] = [[] for _ in group]
        rows = [Row(number, prompt, 0) for number, prompt in enumerate(group)]
        for _ in range(tokens):
            if context.decode(rows) is not Decoded.OK:
                raise SystemExit("the context is too small")
            place, following = -1, []
            for row in rows:
                place += len(row.tokens)
                logits = context.logits(place)
                best = np.partition(logits, -2)[-2:]
                token = sampler.choose(logits)
                drawn[row.sequence].append(token)
                gap[row.sequence].append(float(best[1] - best[0]))
                following.append(Row(row.sequence, [token], row.position + len(row.tokens)))
            rows = following
        found += drawn
        gaps += gap
    return found, gaps


def compare(width: int, alone: list[list[int]], gaps: list[list[float]], found: list[list[int]]) -> Width:
    """Answers of a width beside those of width 1."""
    firsts = []
    for one, other, gap in zip(alone, found, gaps, strict=True):
        first = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            firsts.append((first, gap[first]))
    return Width(
        width, len(alone), len(firsts), round(median(at for at, _ in firsts)) if firsts else None,
        round(median(gap for _, gap in firsts), 3) if firsts else None,
    )  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1, help="more wait for each other on a busy machine")
    asked = parser.parse_args()
    path = pull("smollm2", models_path=Config().models_path, keep_free_bytes=GIB).path
    library = open_running()
    model = Model.load(library, path, ModelSettings())
    texts = [ASKED[number % 3].format(SUBJECTS[number % len(SUBJECTS)]) for number in range(asked.prompts)]
    prompts = [
        list(model.vocab.tokenise(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")) for text in texts
    ]
    context = Context(
        model,
        ContextSettings(
            cells=2048, context=256, sequences=max(WIDTHS), threads=asked.threads, threads_batch=asked.threads
        ),
    )
    alone, gaps = answers(context, prompts, 1, asked.tokens)
    widths = []
    for width in WIDTHS:
        found, _ = answers(context, prompts, width, asked.tokens)
        widths.append(compare(width, alone, gaps, found))
        last = widths[-1]
        print(
            f"width {width}: {last.different} of {last.answers} answers differ, first at token {last.first_difference}"
        )
    result = {
        "date": datetime.now(UTC).date().isoformat(), "model": path.name, "build": f"llama.cpp {library.version}",
        "machine": f"{read_cpu(LocalHost())[0].model or platform.machine()}, {asked.threads} threads",
        "tokens": asked.tokens, "widths": [asdict(width) | {"share": width.share} for width in widths],
    }  # fmt: skip
    target = Path(__file__).parent / "results" / "batch_width.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    context.close()
    model.close()


if __name__ == "__main__":
    main()
