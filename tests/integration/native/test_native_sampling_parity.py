"""The same request and seed give the same tokens as llama-server with the same build and model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.embedded_server import EmbeddedServer, embedded_server
from support.native import Work, opened
from tokenmill.engine.engine import Sampling
from tokenmill.native.llama.context import Decoded, LlamaContext
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.sampling.sampler import Sampler

PROMPT = "<|im_start|>user\nName three animals of the sea and say what they eat.<|im_end|>\n<|im_start|>assistant\n"
COUNT = 20
# `x-guidance`: without our limit of whitespace between the parts, which the server of the wheel does not have.
SCHEMA = (
    '{"type":"object","properties":{"animal":{"type":"string"},"legs":{"type":"integer"}},"required":["animal","legs"],'
    '"x-guidance":{}}'
)
LIST = 'root ::= item+\nitem ::= "- " [a-z ]+ "\\n"\n'


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(smollm2_path, n_ctx=1024, n_parallel=1, cache_ram_mib=0, warmup=False, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def context(smollm2_path: Path) -> Iterator[LlamaContext]:
    settings = ContextSettings(cells=1024, context=1024, sequences=2, threads=1, threads_batch=1)
    with opened(smollm2_path, settings) as made:
        yield made


@dataclass(frozen=True)
class Case:
    name: str
    sampling: Sampling
    ignore_eos: bool = False

    def body(self) -> dict[str, Any]:
        """The request as llama-server spells it."""
        names = {"penalty_last_n": "repeat_last_n"}
        given = {
            names.get(name, name): getattr(self.sampling, name)
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repeat_penalty",
                "presence_penalty",
                "frequency_penalty",
                "penalty_last_n",
                "seed",
                "grammar",
            )
            if getattr(self.sampling, name) is not None
        }
        if self.sampling.logit_bias:
            given["logit_bias"] = [[t, False if b == float("-inf") else b] for t, b in self.sampling.logit_bias]
        if self.sampling.json_schema is not None:
            given["json_schema"] = json.loads(self.sampling.json_schema)
        return given | {"ignore_eos": self.ignore_eos}


CASES = [
    Case("greedy", Sampling(temperature=0)),
    Case("defaults", Sampling(seed=1)),
    Case("defaults, another seed", Sampling(seed=2)),
    Case("hot", Sampling(temperature=1.7, top_k=0, top_p=1.0, min_p=0.0, seed=3)),
    Case("top-k", Sampling(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, seed=4)),
    Case("top-p", Sampling(temperature=1.0, top_k=0, top_p=0.6, min_p=0.0, seed=5)),
    Case("min-p", Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.1, seed=6)),
    Case("repeat penalty, which sees the prompt", Sampling(seed=7, repeat_penalty=1.4, penalty_last_n=32)),
    Case("presence and frequency", Sampling(seed=8, presence_penalty=0.8, frequency_penalty=0.9)),
    Case("greedy with penalties", Sampling(temperature=0, repeat_penalty=1.3)),
    Case("bias", Sampling(seed=9, logit_bias=((28, -5.0), (260, 3.0), (198, float("-inf"))))),
    Case("greedy with bias", Sampling(temperature=0, logit_bias=((28, 4.0),))),
    Case("grammar", Sampling(seed=10, grammar=LIST)),
    Case("greedy grammar", Sampling(temperature=0, grammar=LIST)),
    Case("schema", Sampling(seed=11, json_schema=SCHEMA)),
    Case("ignore the end", Sampling(seed=12, temperature=1.2), ignore_eos=True),
]


def generate(context: LlamaContext, case: Case) -> list[int]:
    model: LlamaModel = context.model
    tokens = model.vocab.tokenize(PROMPT)
    sampler = Sampler(model.vocab, case.sampling, prompt=tokens, ignore_eos=case.ignore_eos)
    context.clear()
    assert context.decode([Work(0, tokens, 0, True)]) is Decoded.OK
    drawn: list[int] = []
    place, position = len(tokens) - 1, len(tokens)
    while len(drawn) < COUNT:
        token = sampler.sample(context, place)
        drawn.append(token)
        if model.vocab.is_end(token):
            break
        assert context.decode([Work(0, [token], position, True)]) is Decoded.OK
        place, position = 0, position + 1
    sampler.close()
    return drawn


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tokens_of_llama_server(case: Case, server: EmbeddedServer, context: LlamaContext) -> None:
    answer = server.post(
        "/completion", prompt=PROMPT, n_predict=COUNT, return_tokens=True, cache_prompt=False, **case.body()
    )
    assert generate(context, case) == answer["tokens"]
