"""The undisturbed side of a kill storm: jobs whose answers do not depend on rounding, and the comparison with them.

`make_reference` writes a tiny model and answers prompts without interruption; `output_damage` compares an output file
with the result.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.run_cli import tokenmill, write
from tokenmill.model.synthetic import generate

Line = Mapping[str, Any]
Answer = tuple[str, str, int]  # text, finish reason, tokens

SETTINGS = (
    "--context=256",
    "--sequences=4",
    "--threads=1",
    "--threads-batch=1",
    "--cache-type=f32",
    "--no-warm",
)
_SEEDS = 8  # jobs with the same prompt
_MIN_GAP = 0.02  # of the two best log probabilities; how tokens are batched moves them by up to 0.0013 on this model


@dataclass(frozen=True, slots=True)
class Reference:
    """Jobs and the answers of a run that nothing interrupted."""

    model: Path
    lines: tuple[Line, ...]
    answers: Mapping[str, Answer]
    engine: str  # kind and build


def make_reference(folder: Path, jobs: int) -> Reference:
    """Write a tiny model, answer prompts without interruption, and make at least `jobs` jobs of them.

    How tokens are batched changes the rounding of logits, so only prompts are kept whose every token is chosen by a
    clear margin: their greedy answers are the same in whatever order and company they are computed. Each prompt becomes
    several jobs with different seeds: different jobs to the store, the same answer at temperature 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "dense.gguf"
    sizes: dict[str, int | None] = {
        "layers": 2,
        "embed": 128,
        "heads": 4,
        "head_dim": 32,
        "dense_ff": 256,
        "vocab": 2048,
    }
    generate.write("dense", generate.sizes("dense", sizes), model, type="F32")
    wanted = -(-jobs // _SEEDS)
    candidates = [_job(number) for number in range(2 * wanted + 20)]
    source = write(folder / "candidates.jsonl", [{**line, "logprobs": 2} for line in candidates])
    output = folder / "candidates.out"
    words = ("run", source, "-o", output, "--store", folder / "candidates", "--model", model, *SETTINGS, "--json")
    done = tokenmill(folder / "home", *words)
    assert done.returncode == 0, done.stderr
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(output)}
    clear = [line for line in candidates if _margin(bodies[line["custom_id"]]) > _MIN_GAP][:wanted]
    assert len(clear) == wanted, f"{len(clear)} of {len(candidates)} prompts have a clear answer"
    answers = {line["custom_id"]: _answer(bodies[line["custom_id"]]) for line in clear}
    assert len(set(answers.values())) > wanted // 2  # else a swap of two answers would not show
    lines = [
        {**line, "custom_id": f"{line['custom_id']}-{seed}", "seed": seed} for seed in range(_SEEDS) for line in clear
    ]
    return Reference(
        model,
        tuple(lines),
        {line["custom_id"]: answers[line["custom_id"].rpartition("-")[0]] for line in lines},
        bodies[clear[0]["custom_id"]]["system_fingerprint"],
    )


def _job(number: int) -> dict[str, Any]:
    prompt = f"{number * 7919 % 100_003} is the number of report {number}."
    return {"custom_id": f"job-{number}", "prompt": prompt, "max_tokens": 8, "temperature": 0}


def _margin(body: Mapping[str, Any]) -> float:
    """The smallest gap between the two best tokens of any step; 0 if two tokens have the same text."""
    steps = [sorted(step.values()) for step in body["choices"][0]["logprobs"]["top_logprobs"]]
    return min((step[-1] - step[-2] if len(step) > 1 else 0.0 for step in steps), default=0.0)


def _answer(body: Mapping[str, Any]) -> Answer:
    choice = body["choices"][0]
    return choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def output_damage(reference: Reference, lines: Iterable[Line]) -> Counter[str]:
    """Count lost, doubled, changed and misplaced lines of an output file."""
    order = [line["custom_id"] for line in reference.lines]
    seen = Counter[str]()
    answered = set[str]()
    damage = Counter[str]()
    for line in lines:
        name = line["custom_id"]
        damage["doubled"] += name in seen
        seen[name] += 1
        if line["response"]:
            answered.add(name)
            damage["changed"] += _answer(line["response"]["body"]) != reference.answers.get(name)
    damage["lost"] = len(set(order) - answered)
    damage["misplaced"] = int(list(seen) != [name for name in order if name in seen])
    return +damage
