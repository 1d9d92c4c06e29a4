"""llama.cpp loads synthetic models and decodes with them."""

from pathlib import Path
from typing import get_args

import pytest

from support import llama
from tokenmill.model.synthetic import generate, weights
from tokenmill.model.synthetic.generate import SyntheticKind

PROMPT = "<|im_start|>user\nWhat is the tide? Füße, 潮汐 🌊\t\x07 end<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", get_args(SyntheticKind))
def test_it_decodes_finite_varied_and_the_same_twice(kind: SyntheticKind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made = generate.write(kind, generate.sizes(kind, {}), path)
    first, second = (llama.run(path, PROMPT) for _ in range(2))
    assert first.parameters == made.parameters
    assert first.finite
    assert len(first.tokens) == 16
    assert len(set(first.tokens)) > 4  # not stuck on one direction
    assert (first.tokens, first.logits_sha256) == (second.tokens, second.logits_sha256)
    assert first.echoed == PROMPT
    assert first.prompt[0] == 1  # <|im_start|> is one token, not letters
    assert len(first.prompt) < len(PROMPT)  # merges happened


@pytest.mark.parametrize("type", weights.TYPES)
def test_every_type_that_can_be_made_runs(type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2}), path, type=type)
    ran = llama.run(path, "the tide", tokens=4)
    assert ran.finite
    assert type in ("F32", "F16", "BF16") or type.split("_", maxsplit=1)[0] in ran.description


def test_prompts_lead_to_different_answers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write("moe", generate.sizes("moe", {}), path)
    assert llama.run(path, "the tide").tokens != llama.run(path, "the moon").tokens
