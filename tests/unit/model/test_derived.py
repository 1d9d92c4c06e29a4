"""Models derived from a config.json: references, quantizations, and errors with the nearest valid choice."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import CorruptModel, ModelError, TokenmillError, UnknownModel
from tokenmill.model import catalog, derived
from tokenmill.model.read import read
from tokenmill.model.synthetic import ghost

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "max_position_embeddings": 40960,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "a_field_that_no_converter_reads": {"of": ["any", "type"]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "Qwen3-30B-A3B"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(QWEN))
    return made


def test_a_config_gives_the_model_of_the_catalogue(folder: Path) -> None:
    found = read(f"{folder}/config.json:Q4_K_S")
    named = read("qwen3-30b-a3b:Q4_K_S")
    assert found.tensors[-1].shape == named.tensors[-1].shape
    assert [(t.name, t.shape, t.type) for t in found.tensors] == [(t.name, t.shape, t.type) for t in named.tensors]
    assert (found.name, found.cache, found.experts) == ("Qwen3-30B-A3B", named.cache, named.experts)
    assert (found.tokenizer.tokens, found.quantisation) == (151936, "Q4_K_S")


@pytest.mark.parametrize("ending", ["", "/config.json", ":Q4_K_M", "/config.json:q4_k_m"])
def test_references(ending: str, folder: Path) -> None:
    found = read(f"{folder}{ending}")
    assert found.quantisation == "Q4_K_M"
    assert len(found.guesses) == (1 if ":" in ending else 2)  # the assumed quantization is a guess


def test_a_folder_of_weights_is_read_as_such_unless_a_quantization_is_given(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    assert derived.reference(str(folder)) is None
    assert read(f"{folder}:Q8_0").quantisation == "Q8_0"


@pytest.mark.parametrize("text", ["model.gguf", "kimi-k2.5:Q4_K_S", "nowhere/config.json", "https://host/m.gguf", ""])
def test_other_models_are_no_references(text: str) -> None:
    assert derived.reference(text) is None


def test_a_language_model_in_a_multimodal_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": QWEN}))
    assert read(f"{folder}:Q8_0").architecture == "qwen3moe"


@pytest.mark.parametrize(
    ("change", "error", "hinted"),
    [
        ({"model_type": "qwen3_mo", "architectures": []}, UnknownModel, "qwen3_moe"),
        ({"model_type": None, "architectures": []}, UnknownModel, "GGUF"),
        ({"num_hidden_layers": None, "num_hidden_layer": 48}, ModelError, "num_hidden_layer "),
        ({"hidden_size": "wide"}, ModelError, "config.json"),
        ({"vocab_size": -1}, ModelError, "config.json"),
    ],
)
def test_configs_that_cannot_be_converted(
    change: dict[str, Any], error: type[TokenmillError], hinted: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN | change))
    with pytest.raises(error) as caught:
        read(f"{folder}:Q8_0")
    assert hinted in str(caught.value.hint)


def test_a_wrong_quantization_is_refused_with_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownModel) as caught:
        read(f"{folder}:Q4_K_XL")
    assert str(caught.value.hint).startswith("did you mean Q4_K_")


def test_damaged_configs(folder: Path) -> None:
    (folder / "config.json").write_text("<html>")
    with pytest.raises(CorruptModel):
        read(f"{folder}:Q8_0")
    with pytest.raises(CorruptModel):
        derived.parse_config(b"[1]", "a page")


def test_a_ghost_of_a_config_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    ghost.write(f"{folder}:Q4_K_S", tmp_path / "ghost.gguf")
    assert [t.bytes for t in read(tmp_path / "ghost.gguf").tensors] == [
        t.bytes for t in read("qwen3-30b-a3b:Q4_K_S").tensors
    ]


@pytest.mark.parametrize("name", catalog.names())
def test_every_entry_states_its_source(name: str) -> None:
    entry = catalog.entry(name)
    assert any("/" in source for source in entry.sources)
    for alias in entry.aliases:
        assert catalog.entry(alias).name == name


@pytest.mark.parametrize(
    ("alias", "model"),
    [("deepseek-r1", "deepseek-r1"), ("qwen3-coder", "qwen3-coder-480b-a35b"), ("Kimi-K2.7", "kimi-k2.7-code")],
)
def test_aliases(alias: str, model: str) -> None:
    assert catalog.resolve(f"{alias}:q8_0") == (model, "Q8_0")
