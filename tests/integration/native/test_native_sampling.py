"""Samplers of the real library on given logits: sequences are independent, and constraints hold."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.native import Work, loaded
from tokenmill.engine.engine import Sampling
from tokenmill.errors import NonFiniteLogits, RequestRefused
from tokenmill.native.llama.context import LlamaContext, Logits
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.sampling.sampler import Sampler

HOT = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=42)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[LlamaModel]:
    with loaded(smollm2_path) as made:
        yield made


@pytest.fixture(scope="module")
def logits(model: LlamaModel) -> list[Logits]:
    random = np.random.default_rng(0)
    return [random.normal(size=model.vocab.n_tokens).astype(np.float32) * 3 for _ in range(16)]


def drawn(sampler: Sampler, logits: list[Logits]) -> list[int]:
    return [sampler.choose(each) for each in logits]


def test_other_sequences_do_not_change_samples(model: LlamaModel, logits: list[Logits]) -> None:
    alone = drawn(Sampler(model.vocab, HOT), logits)
    one = Sampler(model.vocab, HOT)
    beside = [Sampler(model.vocab, Sampling(temperature=1.0, seed=seed)) for seed in (42, 7, 8)]
    together = []
    for turn, each in enumerate(logits):
        for other in beside[: 1 + turn % 3]:
            other.choose(logits[-1 - turn])
        together.append(one.choose(each))
    assert together == alone
    assert drawn(Sampler(model.vocab, HOT, seed=43), logits) != alone


def test_the_drawn_seed_draws_the_same_again(model: LlamaModel, logits: list[Logits]) -> None:
    first = Sampler(model.vocab, Sampling(temperature=1.5, top_k=0))
    assert drawn(first, logits) == drawn(
        Sampler(model.vocab, Sampling(temperature=1.5, top_k=0), seed=first.seed), logits
    )


def test_the_logits_are_left_as_they_were(model: LlamaModel, logits: list[Logits]) -> None:
    before = logits[0].copy()
    for sampling in (Sampling(temperature=0), HOT, Sampling(logit_bias=((5, -9.0),), grammar='root ::= "a"')):
        Sampler(model.vocab, sampling).choose(logits[0])
    assert np.array_equal(logits[0], before)


def test_greedy_takes_the_largest(model: LlamaModel, logits: list[Logits]) -> None:
    plain = Sampler(model.vocab, Sampling(temperature=0))
    assert plain.greedy
    best = int(logits[0].argmax())
    assert plain.choose(logits[0]) == best
    banned = Sampler(model.vocab, Sampling(temperature=0, logit_bias=((best, float("-inf")),)))
    assert not banned.greedy
    assert banned.choose(logits[0]) == int(np.argsort(logits[0])[-2])
    raised = Sampler(model.vocab, Sampling(temperature=0, logit_bias=((17, 1000.0),)))
    assert raised.choose(logits[0]) == 17


def test_top_k_one_is_greedy_whatever_the_seed(model: LlamaModel, logits: list[Logits]) -> None:
    sampler = Sampler(model.vocab, Sampling(temperature=2.0, top_k=1, seed=5))
    assert drawn(sampler, logits) == [int(each.argmax()) for each in logits]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("top_k", [1, 40, 100])
def test_the_k_largest_alone_give_the_same_draws(
    model: LlamaModel, logits: list[Logits], monkeypatch: pytest.MonkeyPatch, top_k: int, ignore_eos: bool
) -> None:
    hot = replace(HOT, top_k=top_k, top_p=0.9, min_p=0.01)
    quick = drawn(Sampler(model.vocab, hot, ignore_eos=ignore_eos), logits)
    monkeypatch.setattr(Sampler, "_likeliest", lambda *_: None)
    assert quick == drawn(Sampler(model.vocab, hot, ignore_eos=ignore_eos), logits)


def test_a_forbidden_token_is_not_among_the_largest(model: LlamaModel) -> None:
    logits = np.zeros(model.vocab.n_tokens, np.float32)
    logits[[5, 9]], logits[list(model.vocab.ends)] = 20.0, 30.0
    sampler = Sampler(model.vocab, replace(HOT, top_k=2), ignore_eos=True)
    assert {sampler.choose(logits) for _ in range(40)} == {5, 9}


def test_penalties_see_the_prompt_and_the_answer(model: LlamaModel, logits: list[Logits]) -> None:
    order = np.argsort(-logits[0]).tolist()
    strong = Sampling(temperature=0, presence_penalty=100.0, penalty_last_n=3)
    sampler = Sampler(model.vocab, strong, prompt=[order[0]])
    # after three draws the prompt's token has left the last three
    assert [sampler.choose(logits[0]) for _ in range(4)] == [order[1], order[2], order[3], order[0]]


def test_the_end_can_be_ignored(model: LlamaModel, logits: list[Logits]) -> None:
    end = model.vocab.eos
    assert end is not None
    ending = logits[0].copy()
    ending[end] = 1000.0
    assert Sampler(model.vocab, Sampling(temperature=0)).choose(ending) == end
    assert Sampler(model.vocab, Sampling(temperature=0), ignore_eos=True).choose(ending) == int(logits[0].argmax())


@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_holds_at_any_temperature(model: LlamaModel, logits: list[Logits], seed: int) -> None:
    sampler = Sampler(model.vocab, Sampling(temperature=3.0, seed=seed, grammar='root ::= ("yes" | "no") "!"'))
    text = b""
    for each in logits:
        token = sampler.choose(each)
        if model.vocab.is_end(token):
            break
        text += model.vocab.piece(token)
    assert text in (b"yes!", b"no!")
    sampler.close()
    sampler.close()  # once is enough


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_on_any_logits(model: LlamaModel, seed: int) -> None:
    schema = {
        "type": "object",
        "required": ["kind", "ok", "n"],
        "additionalProperties": False,
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "ok": {"type": "boolean"},
            "n": {"type": "integer", "minimum": 3, "maximum": 17},
        },
    }
    sampler = Sampler(model.vocab, Sampling(temperature=2.0, seed=seed, json_schema=json.dumps(schema)))
    random = np.random.default_rng(seed)
    spaces = [
        token for token in range(model.vocab.n_tokens) if model.vocab.piece(token).strip() != model.vocab.piece(token)
    ]
    text = b""
    for _ in range(200):
        given = random.normal(size=model.vocab.n_tokens).astype(np.float32)
        given[spaces] = -100.0  # JSON may have any number of them
        token = sampler.choose(given)
        if model.vocab.is_end(token):
            break
        text += model.vocab.piece(token)
    found = json.loads(text)
    assert set(found) == {"kind", "ok", "n"}
    assert found["kind"] in ("cat", "dog")
    assert 3 <= found["n"] <= 17
    sampler.close()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(grammar='root ::= "a" | missing'),
        Sampling(grammar="root ::= root"),
        Sampling(json_schema='{"type": "nonsense"}'),
        Sampling(json_schema='{"type": "string", "pattern": "("}'),
        Sampling(logit_bias=((-1, 0.0),)),
        Sampling(logit_bias=((10**6, 0.0),)),
        Sampling(logit_bias=((5, float("nan")),)),
        Sampling(logit_bias=((5, float("inf")),)),
        Sampling(top_logprobs=21),
        Sampling(top_logprobs=-1),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_prints_nothing(
    model: LlamaModel, sampling: Sampling, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestRefused) as caught:
        Sampler(model.vocab, sampling)
    assert (caught.value.code, bool(caught.value.hint)) == ("invalid_request", True)
    assert capfd.readouterr().err == ""


def test_a_grammar_that_no_token_fits(model: LlamaModel, logits: list[Logits]) -> None:
    everything = tuple((token, float("-inf")) for token in range(model.vocab.n_tokens))
    with pytest.raises(RequestRefused):
        Sampler(model.vocab, Sampling(grammar='root ::= "a"', logit_bias=everything)).choose(logits[0])
    with pytest.raises(RequestRefused):
        Sampler(model.vocab, Sampling(logit_bias=everything)).choose(logits[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), HOT, Sampling(temperature=1.0, top_k=0)])
def test_one_logit_that_is_not_finite_is_an_error(
    model: LlamaModel, logits: list[Logits], sampling: Sampling, value: float
) -> None:
    broken = logits[0].copy()
    broken[len(broken) // 2] = value
    sampler = Sampler(model.vocab, sampling)
    with pytest.raises(NonFiniteLogits):
        sampler.choose(broken)
    sampler.close()


def test_log_probabilities_of_a_row(model: LlamaModel) -> None:
    context = LlamaContext(model, ContextSettings(cells=256, context=256, sequences=1, threads=1, threads_batch=1))
    tokens = model.vocab.tokenize("The capital of France is")
    context.decode([Work(0, tokens, 0)])
    place = len(tokens) - 1
    sampler = Sampler(model.vocab, Sampling(temperature=0, top_logprobs=5))
    token = sampler.sample(context, place)
    found = sampler.logprobs(context, place, token, 5)
    assert (found.token, found.text, found.raw) == (token, " Paris", b" Paris")
    assert found.logprob == found.top[0].logprob
    assert [one.logprob for one in found.top] == sorted((one.logprob for one in found.top), reverse=True)
    assert len(found.top) == 5
    assert sum(np.exp(one.logprob) for one in found.top) < 1
    assert sampler.logprobs(context, place, token, 0).top == ()
    context.close()
