"""Profiles from headers: classes, reads, parameters, guesses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, array, value, write
from tokenmill.errors import CorruptModel, ModelError
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers
from tokenmill.model.profile import Experts, Profile, TensorClass

MOE_KEYS: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 3,
    "qwen3moe.embedding_length": 64,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.context_length": 4096,
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.nextn_predict_layers": 1,
    "general.file_type": 7,
}
MOE_TABLE = [
    ("token_embd.weight", (64, 1000), "F16"),
    ("output.weight", (64, 1000), "F16"),
    ("output_norm.weight", (64,), "F32"),
    *(
        row
        for layer in range(3)
        for row in (
            (f"blk.{layer}.attn_q.weight", (64, 64), "Q8_0"),
            (f"blk.{layer}.ffn_gate_inp.weight", (64, 8), "F32"),
            (f"blk.{layer}.ffn_up_exps.weight", (64, 32, 8), "Q4_0"),
        )
    ),
]


def profile(path: Path, keys: dict[str, Any], table: list[Any]) -> Profile:
    return describe(read_headers(write(path / "m.gguf", keys, table)))


def test_moe_with_prediction_layer(tmp_path: Path) -> None:
    found = profile(tmp_path, MOE_KEYS, MOE_TABLE)
    attention, experts, router = 64 * 64 // 32 * 34, 64 * 32 * 8 // 32 * 18, 64 * 8 * 4
    assert (found.layers, len(found.cache)) == (2, 2)
    assert found.experts == Experts(8, 2, None)
    assert found.by_class() == {
        TensorClass.EMBEDDING: 128_000,
        TensorClass.ATTENTION: 2 * attention,
        TensorClass.ROUTER: 2 * router,
        TensorClass.ROUTED_EXPERTS: 2 * experts,
        TensorClass.NORM: 256,
        TensorClass.OUTPUT: 128_000,
        TensorClass.MTP: attention + router + experts,
    }
    assert found.by_layer()[0] == {
        TensorClass.ATTENTION: attention,
        TensorClass.ROUTER: router,
        TensorClass.ROUTED_EXPERTS: experts,
    }
    assert sum(found.by_class().values()) == sum(found.by_type().values()) == found.bytes
    one = (
        128 + 2 * attention + 2 * router + 2 * experts / 4 + 256 + 128_000
    )  # one embedding row, a quarter of the experts
    assert found.read_bytes(1) == pytest.approx(one)
    assert found.read_bytes(1, TensorClass.ROUTED_EXPERTS) == pytest.approx(2 * experts / 4)
    assert found.read_bytes(2, TensorClass.ROUTED_EXPERTS) == pytest.approx(2 * experts * (1 - 0.75**2))
    assert found.active_parameters == 64 + 2 * (4096 + 512 + 16384 // 4) + 64 + 64_000
    assert found.quantisation == "Q8_0"
    assert found.training_context == 4096
    assert found.guesses == ()


def test_tied_output_reads_the_whole_table(tmp_path: Path) -> None:
    tied = profile(tmp_path, TINY_KEYS, TINY_TABLE)
    assert tied.tied_output
    assert tied.read_bytes(1) == tied.bytes
    assert tied.active_parameters == tied.parameters


def test_tokenizer(tmp_path: Path) -> None:
    keys = TINY_KEYS | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": array(8, ["a"] * 100),
        "tokenizer.chat_template": "{{ messages }}",
    }
    found = profile(tmp_path, keys, TINY_TABLE).tokenizer
    assert (found.model, found.pre, found.tokens, found.chat_template) == ("gpt2", "smollm", 100, True)
    assert profile(tmp_path, TINY_KEYS, TINY_TABLE).tokenizer.model is None


def test_splits_are_one_model(tmp_path: Path) -> None:
    for number in range(2):
        keys = TINY_KEYS | {"split.no": number, "split.count": 2}
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", keys, TINY_TABLE[number::2])
    found = describe(read_headers(tmp_path / "m-00001-of-00002.gguf"))
    assert {tensor.file for tensor in found.tensors} == {0, 1}
    assert found.bytes == profile(tmp_path, TINY_KEYS, TINY_TABLE).bytes
    assert [file.path for file in found.files] == [str(path) for path in sorted(tmp_path.glob("m-*"))]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"general.architecture": 3}, ModelError, "general.architecture"),
        ({"llama.block_count": 4_000_000_000}, CorruptModel, "4096 layers"),
        ({"general.architecture": "a" * 300}, CorruptModel, "300 characters"),
        ({"llama.expert_count": 2, "llama.expert_used_count": 3}, CorruptModel, "3 of 2 experts"),
    ],
)
def test_wrong_keys(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        profile(tmp_path, TINY_KEYS | change, TINY_TABLE)


def test_vocabulary_file_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tensors"):
        profile(tmp_path, TINY_KEYS, [])


def test_guesses_are_reported(tmp_path: Path) -> None:
    keys = {"general.architecture": "novel"}
    found = profile(tmp_path, keys, MOE_TABLE)
    assert found.layers == 3
    assert found.bytes == profile(tmp_path, MOE_KEYS, MOE_TABLE).bytes
    text = " ".join(found.guesses)
    for words in (
        "block_count",
        "'novel'",
        "experts per token",
        "size of the KV cache",
    ):
        assert words in text


@given(st.integers(1, 512), st.data())
def test_distinct_experts(count: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, count))
    experts = Experts(count, used)
    assert experts.distinct(1) == pytest.approx(used)
    counts = [experts.distinct(tokens) for tokens in (1, 2, 4, 64, 100_000)]
    assert counts == sorted(counts)
    assert counts[-1] <= count


def test_names_are_cut_to_what_a_person_reads(tmp_path: Path) -> None:
    keys = TINY_KEYS | {"general.name": "n" * 100_000, "tokenizer.ggml.model": "m" * 100_000}
    found = profile(tmp_path, keys, TINY_TABLE)
    assert found.name == "n" * 256 + "..."
    assert found.tokenizer.model == "m" * 256 + "..."


def test_negative_numbers_are_ignored(tmp_path: Path) -> None:
    keys = TINY_KEYS | {"llama.attention.head_count": value(-4, 5), "llama.attention.head_count_kv": value(-2, 5)}
    found = profile(tmp_path, keys, TINY_TABLE)
    assert found.cache_bytes(1000) == 0
    assert any("size of the KV cache" in guess for guess in found.guesses)


def test_many_embeddings_cost_no_more_than_many_other_tensors(tmp_path: Path) -> None:
    table = [(f"token_embd.{number}", (1,), "F32") for number in range(20_000)]
    found = profile(tmp_path, TINY_KEYS, table)
    asked = 0

    class Counted(Profile):
        @property
        def tied_output(self) -> bool:
            nonlocal asked
            asked += 1
            return True

    counted = Counted(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
    assert counted.read_bytes() == pytest.approx(20_000 * 4)
    assert asked == 1
