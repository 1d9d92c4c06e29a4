"""`tokenmill run` on models with a recurrent state: nested prefixes, each computed once, and the same answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.hybrid_models import delta_net, kda, mamba
from support.native import Work, loaded
from support.run_cli import ran, read, tokenmill, write
from tokenmill.native.llama.context import LlamaContext
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.sampling.detokenize import Detokenizer

THINGS = ("river", "bridge", "harbour", "field")
QUESTIONS = ("Who built it?", "When was it seen?", "Where does it lead?", "Why is it here?")
ANSWER = 4
CONTEXT = ContextSettings(cells=1024, context=1024, sequences=1, batch=1024, ubatch=512)
ENGINE = ("--context", 1024, "--sequences", 3, "--threads", 1, "--threads-batch", 1, "--cache-type-k", "f16")


def messages() -> dict[str, list[dict[str, str]]]:
    """Two digests, four documents below each, four questions about each document."""
    found = {}
    for digest in range(2):
        rules = " ".join(f"Rule {number} of digest {digest}: a report names its author." for number in range(8))
        for thing in THINGS:
            text = f"On the {thing}. " + f"The {thing} of mill {digest} is old, wide and deep. " * 4
            for number, question in enumerate(QUESTIONS):
                turns = [{"role": "system", "content": rules}, {"role": "user", "content": text + question}]
                found[f"{digest}-{thing}-{number}"] = turns
    return found


def line(name: str, turns: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": turns, "temperature": 0, "max_tokens": ANSWER, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def alone(turns: list[dict[str, str]], context: LlamaContext) -> str:
    """The greedy answer to a prompt that is computed from nothing."""
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    vocab = context.model.vocab
    prompt = vocab.tokenize(f"{text}<|im_start|>assistant\n")
    context.clear()
    context.decode([Work(0, prompt, 0)])
    row, raw = len(prompt) - 1, b""
    for number in range(ANSWER):
        token = int(context.logits(row).argmax())
        raw += vocab.piece(token)
        context.decode([Work(0, [token], len(prompt) + number)])
        row = 0
    detokenizer = Detokenizer()
    return detokenizer.add(raw) + detokenizer.end()


@pytest.mark.parametrize("make", [delta_net, mamba, kda], ids=lambda make: make.__name__)
def test_a_batch_computes_at_most_two_percent_more_than_it_must(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = make(tmp_path / "model.gguf")
    asked = messages()
    source = write(tmp_path / "jobs.jsonl", [line(name, turns) for name, turns in asked.items()])
    output = tmp_path / "out.jsonl"
    totals = ran(tmp_path / "home", source, "--output", output, "--model", model, *ENGINE)
    assert (totals["succeeded"], totals["least_is_exact"]) == (32, True)
    assert totals["computed_prompt_tokens"] <= 1.02 * totals["least_prompt_tokens"]
    assert totals["reused_tokens"] > 5 * totals["computed_prompt_tokens"]
    with loaded(model) as weights:
        context = LlamaContext(weights, CONTEXT)
        for found in read(output):
            answer = found["response"]["body"]["choices"][0]["message"]["content"]
            assert answer == alone(asked[found["custom_id"]], context)
        context.close()


def test_a_digest_is_computed_once_and_restored_at_the_next_start(tmp_path: Path) -> None:
    model, home = kda(tmp_path / "model.gguf"), tmp_path / "home"
    text = " ".join(f"Rule {number}: a report names its author." for number in range(12))
    (tmp_path / "digest.md").write_text(text)
    serve = ("serve", "--engine-only", model, *ENGINE, "--no-warm", "--detach", "--digest", tmp_path / "digest.md")
    for start in range(2):
        done = tokenmill(home, *serve, "--name", "night")
        assert done.returncode == 0, done.stderr
        turns = [[{"role": "system", "content": text}, {"role": "user", "content": f"{start}{at}?"}] for at in range(6)]
        source = write(tmp_path / f"{start}.jsonl", [line(f"{start}{at}", each) for at, each in enumerate(turns)])
        totals = ran(home, source, "--output", tmp_path / f"{start}.out", "--model", model)
        assert totals["succeeded"] == 6
        assert totals["computed_prompt_tokens"] < 0.5 * totals["least_prompt_tokens"], "the digest is there already"
        assert tokenmill(home, "engines", "stop", "night").returncode == 0
