"""Constrained answers with real vocabularies: the masks of llama.cpp's own grammars, and valid answers at a high
temperature.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

from support.native import Work, loaded
from support.schema_cases import LINKED
from support.spm_model import write_spm
from tokenmill.engine.engine import Sampling
from tokenmill.native.constraints.constraints import Constraint
from tokenmill.native.constraints.grammar import grammar_of
from tokenmill.native.llama.context import LlamaContext
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings
from tokenmill.native.llama.vocab import Vocab
from tokenmill.native.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[LlamaModel]:
    with loaded(smollm2_path) as made:
        yield made


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    with loaded(write_spm(tmp_path_factory.mktemp("models") / "spm.gguf")) as made:
        yield made


def constraint(vocab: Vocab, **sampling: Any) -> Constraint:
    return vocab.constraints.compile(grammar_of(Sampling(**sampling), None, vocab.token_of))


def allowed(made: Constraint, vocab: Vocab) -> NDArray[np.bool_]:
    return np.isfinite(made.apply(np.zeros(vocab.n_tokens, np.float32)))


class LlamaGrammar:
    """llama.cpp's own sampler of grammars, as the reference."""

    def __init__(self, model: LlamaModel, text: str) -> None:
        self._ffi, self._lib = model.library.ffi, model.library.lib
        self._ffi.cdef(
            "llama_sampler * llama_sampler_init_grammar(const llama_vocab *, const char *, const char *);",
            override=True,
        )
        made = self._lib.llama_sampler_init_grammar(model.vocab.pointer, text.encode(), b"root")
        self._sampler = self._ffi.gc(made, self._lib.llama_sampler_free)
        self._candidates = np.zeros(model.vocab.n_tokens, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])

    def allowed(self) -> NDArray[np.bool_]:
        self._candidates["id"] = np.arange(len(self._candidates))
        self._candidates["logit"] = 0
        array = self._ffi.new("llama_token_data_array *")
        array.data = self._ffi.cast("llama_token_data *", self._candidates.ctypes.data)
        array.size, array.selected = len(self._candidates), -1
        self._lib.llama_sampler_apply(self._sampler, array)
        return np.asarray(np.isfinite(self._candidates["logit"]))

    def accept(self, token: int) -> None:
        self._lib.llama_sampler_accept(self._sampler, token)


GRAMMARS = {
    "list": 'root ::= item+\nitem ::= "- " [a-z ]+ "\\n"\n',
    "greedy": 'root ::= .* "END" [a-z]{0,3}',
    "escapes": 'root ::= ["\\[\\u4e00-\\u9fff\\\\]+ "\\u00e9\\n" [^a-z\\U0001F600]{2,} "\\x41"',
    "names": 'root ::= Ab (" " ab){1,3}\nAb ::= [A-Z] ab\nab ::= [a-z]+ | "é"',
    "sum": 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")" | [a-z.]+ " "?',
    "tree": 'root ::= "<" [a-z]+ ">" (root | [^<>]+)* "</" [a-z]+ ">"',
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_has_the_masks_of_llama_cpp(model: LlamaModel, name: str) -> None:
    vocab = model.vocab
    ours, reference = constraint(vocab, grammar=GRAMMARS[name]), LlamaGrammar(model, GRAMMARS[name])
    control = np.array([not vocab.piece(token) and token not in vocab.ends for token in range(vocab.n_tokens)])
    chance = np.random.default_rng(len(name))
    for _ in range(12):
        wanted = reference.allowed() & ~control  # llama.cpp lets a model write control tokens as text
        assert np.array_equal(allowed(ours, vocab), wanted)
        going_on = [int(token) for token in np.flatnonzero(wanted) if token not in vocab.ends]
        if not going_on:
            break
        token = int(chance.choice(going_on))
        ours.accept(token)
        reference.accept(token)


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 12}
SHAPES: dict[str, Any] = {
    "person": closed(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, email={"type": ["null"]}),
    "verdict": closed(label={"enum": ["good", "bad", "unclear"]}, score={"type": "number", "minimum": 0, "maximum": 1}),
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 500},
        "minItems": 2,
        "maxItems": 5,
    },
    "tagged": {
        "oneOf": [
            closed(kind={"const": "circle"}, r={"type": "number", "exclusiveMinimum": 0, "maximum": 9}),
            closed(kind={"const": "text"}, t=SHORT),
        ]
    },
    "nested": closed(
        rows={
            "type": "array",
            "maxItems": 2,
            "items": closed(id={"type": "string", "pattern": "^[A-Z]{2}\\d{3}$"}, ok={"type": "boolean"}),
        }
    ),
    "optional": {**closed(a=SHORT, b={"type": "integer", "maximum": 99}, c={"type": "boolean"}), "required": ["b"]},
    "linked": {
        **LINKED,
        "$defs": {
            "node": {
                **LINKED["$defs"]["node"],  # type: ignore[index]
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 99},
                    "next": {"$ref": "#/$defs/node"},
                },
            }
        },
    },
    "merged": {"allOf": [closed(x={"type": "integer", "maximum": 9}), {"properties": {"x": {"minimum": 4}}}]},
}


@pytest.fixture(scope="module")
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    made = LlamaContext(model, ContextSettings(cells=1024, context=1024, sequences=1, threads=1, threads_batch=1))
    yield made
    made.close()


def generated(model: LlamaModel, context: LlamaContext, sampling: Sampling, most: int = 160) -> str | None:
    """An answer of the real model; None where it was not at its end after `most` tokens."""
    vocab = model.vocab
    context.clear()
    prompt = vocab.tokenize("A JSON document:\n")
    sampler, tokens, at, text = Sampler(vocab, sampling), prompt, 0, b""
    try:
        for _ in range(most):
            context.decode([Work(0, tokens, at)])
            at += len(tokens)
            token = sampler.sample(context, len(tokens) - 1)
            if vocab.is_end(token):
                return text.decode()
            text += vocab.piece(token)
            tokens = (token,)
    finally:
        sampler.close()
    return None


@pytest.mark.parametrize(("name", "temperature"), [*((name, 1.5) for name in SHAPES), ("person", 0.0), ("tagged", 0.0)])
def test_answers_are_valid_at_any_temperature(
    model: LlamaModel, context: LlamaContext, name: str, temperature: float
) -> None:
    compact = {**SHAPES[name], "x-guidance": {"whitespace_flexible": False}}
    ended = 0
    for seed in range(2):
        sampling = Sampling(temperature=temperature, seed=seed, top_k=0, json_schema=json.dumps(compact))
        text = generated(model, context, sampling)
        if text is not None:
            ended += 1
            assert Draft202012Validator(SHAPES[name]).is_valid(json.loads(text)), text
    assert ended


def written(vocab: Vocab, schema: Any, seed: int = 0) -> str:
    """An answer on random logits."""
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    sampler = Sampler(vocab, Sampling(temperature=2.0, seed=seed, json_schema=json.dumps(compact)))
    chance, text = np.random.default_rng(seed), b""
    for _ in range(100):
        token = sampler.choose(chance.normal(size=vocab.n_tokens).astype(np.float32))
        if vocab.is_end(token):
            return text.decode()
        text += vocab.piece(token)
    raise AssertionError(text)


@pytest.mark.parametrize("text", ["<|im_end|>", " <s>word", "hello wörld", "\u65e5\u672c \U0001f986", 'a "b"\n'])
def test_a_constant_is_written_as_it_is(model: LlamaModel, spm: LlamaModel, text: str) -> None:
    for vocab in (model.vocab, spm.vocab):
        assert json.loads(written(vocab, {"const": [text, 5]})) == [text, 5]


@pytest.mark.parametrize("seed", range(3))
def test_a_vocabulary_with_byte_tokens_and_spaces_before_words(spm: LlamaModel, seed: int) -> None:
    schema = closed(kind={"enum": ["hello word", "é"]}, n={"type": "integer", "minimum": 3, "maximum": 17})
    found = json.loads(written(spm.vocab, schema, seed))
    assert Draft202012Validator(schema).is_valid(found), found


def test_equal_tokens_are_allowed_alike(model: LlamaModel) -> None:
    """A vocabulary may have the same bytes more than once."""
    vocab = model.vocab
    may = allowed(constraint(vocab, grammar="root ::= [^a-z]+"), vocab)
    by_bytes: dict[bytes, set[bool]] = {}
    for token in range(vocab.n_tokens):
        if vocab.piece(token):
            by_bytes.setdefault(vocab.piece(token), set()).add(bool(may[token]))
    assert all(len(found) == 1 for found in by_bytes.values())
