"""Folders with indexes, shards or single files, and errors of broken ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.safetensors_folder import header, write_file, write_folder, write_raw
from tokenmill.errors import CorruptModel, MissingSplit, ModelError, TokenmillError, UnknownModel, UsageError
from tokenmill.model.huggingface.safetensors import read_folder
from tokenmill.model.profile import Experts, LayerCache, TensorClass

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 100,
}
TABLE: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [100, 64]),
    "lm_head.weight": ("BF16", [100, 64]),
    "model.norm.weight": ("BF16", [64]),
} | {
    f"model.layers.{layer}.{name}.weight": ("BF16", shape)
    for layer in range(2)
    for name, shape in {
        "input_layernorm": [64],
        "self_attn.q_proj": [64, 64],
        "self_attn.k_proj": [32, 64],
        "self_attn.v_proj": [32, 64],
        "self_attn.o_proj": [64, 64],
        "mlp.gate_proj": [128, 64],
        "mlp.up_proj": [128, 64],
        "mlp.down_proj": [64, 128],
    }.items()
}
PARAMETERS = 2 * 6400 + 64 + 2 * (64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
PART = "model-0000{}-of-00003.safetensors"


def mixture(experts: int = 4, *, config: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same model with experts in separate tensors."""
    table = {name: kept for name, kept in TABLE.items() if ".mlp." not in name}
    for layer in range(2):
        table[f"model.layers.{layer}.mlp.gate.weight"] = ("BF16", [experts, 64])
        for expert in range(experts):
            table[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] = ("BF16", [32, 64])
            table[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"] = ("BF16", [64, 32])
    declared = {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": 2}
    return table, CONFIG | declared | (config or {})


def test_one_file(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path / "tiny", TABLE, CONFIG))
    assert (profile.name, profile.format, profile.architecture) == ("tiny", "safetensors", "llama")
    assert profile.parameters == PARAMETERS
    assert profile.bytes == 2 * PARAMETERS
    assert profile.active_parameters == PARAMETERS - 99 * 64  # one row of the embedding is read
    assert (profile.layers, profile.embedding_length, profile.heads, profile.kv_heads) == (2, 64, 4, 2)
    assert (profile.training_context, profile.quantisation, profile.experts) == (512, "bf16", None)
    assert profile.cache == (LayerCache("full", 32, 32),) * 2
    assert profile.guesses == ()
    tensor = next(item for item in profile.tensors if item.name == "model.layers.1.mlp.down_proj.weight")
    assert (tensor.cls, tensor.layer, tensor.shape, tensor.type) == (TensorClass.DENSE_FFN, 1, (128, 64), "BF16")


def test_the_offsets_lead_to_the_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG, shards=3)
    for tensor in read_folder(folder).tensors:
        path = folder / PART.format(tensor.file + 1)
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        begin, end = json.loads(raw[8 : 8 + length])[tensor.name]["data_offsets"]
        assert (tensor.offset, tensor.bytes) == (8 + length + begin, end - begin)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("given", [".", PART.format(1), PART.format(3)])
def test_shards_make_one_model(tmp_path: Path, index: bool, given: str) -> None:
    folder = write_folder(tmp_path / "tiny", TABLE, CONFIG, shards=3, index=index)
    profile = read_folder(folder / given)
    assert (profile.name, profile.parameters, len(profile.files)) == ("tiny", PARAMETERS, 3)
    assert sum(file.bytes for file in profile.files) > profile.bytes


def test_one_file_by_its_name(tmp_path: Path) -> None:
    write_folder(tmp_path, TABLE, CONFIG)
    (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    write_file(tmp_path / "other.safetensors", {"x": ("F32", [5])})
    profile = read_folder(tmp_path / "mine.safetensors")
    assert (profile.name, profile.parameters) == ("mine", PARAMETERS)


def test_a_folder_of_a_hugging_face_cache_has_the_name_of_its_repository(tmp_path: Path) -> None:
    commit = tmp_path / "models--org--Tiny-8B" / "snapshots" / "0123abcd"
    assert read_folder(write_folder(commit, TABLE, CONFIG)).name == "Tiny-8B"


def test_second_copies_and_adapters_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG, shards=3, index=False)
    write_file(folder / "consolidated.safetensors", TABLE)
    write_file(folder / "adapter_model.safetensors", {"lora_A": ("F32", [5])})
    assert read_folder(folder).parameters == PARAMETERS


def test_an_index_of_another_name_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG, shards=3)
    (folder / "model.safetensors.index.json").rename(folder / "weights.safetensors.index.json")
    write_file(folder / "extra.safetensors", {"x": ("F32", [5])})
    assert read_folder(folder).parameters == PARAMETERS


def test_experts_become_one_row_for_each_projection(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path, *mixture(), shards=5))
    assert profile.experts == Experts(4, 2, 0)
    rows = list(profile.of(TensorClass.ROUTED_EXPERTS))
    assert [(row.name, row.shape, row.experts) for row in rows if row.layer == 1] == [
        ("model.layers.1.mlp.experts.*.up_proj.weight", (64, 32, 4), 4),
        ("model.layers.1.mlp.experts.*.down_proj.weight", (32, 64, 4), 4),
    ]
    assert sum(row.bytes for row in rows) == 2 * 4 * 2 * 2048 * 2
    assert profile.active_parameters == profile.parameters - 99 * 64 - 2 * 2 * 2 * 2048


def test_experts_kept_in_different_types_become_different_rows(tmp_path: Path) -> None:
    table, config = mixture()
    table["model.layers.0.mlp.experts.3.up_proj.weight"] = ("F32", [32, 64])
    rows = [
        row for row in read_folder(write_folder(tmp_path, table, config)).tensors if "0.mlp.experts.*.up" in row.name
    ]
    assert [(row.type, row.shape) for row in rows] == [("BF16", (64, 32, 3)), ("F32", (64, 32, 1))]


def test_the_table_wins_over_the_config_about_experts(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path, *mixture(6, config={"num_local_experts": 8})))
    assert profile.experts == Experts(6, 2, 0)
    (guess,) = profile.guesses
    assert "8 experts" in guess
    assert "have 6" in guess


def test_all_experts_count_as_read_if_their_number_per_token_is_unknown(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path, *mixture(config={"num_experts_per_tok": None})))
    assert profile.experts is None
    assert profile.active_parameters == profile.parameters - 99 * 64
    assert [guess for guess in profile.guesses if "experts per token" in guess]


def test_a_config_cannot_use_more_experts_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="use 9 of 4 experts"):
        read_folder(write_folder(tmp_path, *mixture(config={"num_experts_per_tok": 9})))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    table = {
        "core.stages.0.zip.weight": ("BF16", [64, 64]),
        "core.stages.1.zip.weight": ("BF16", [64, 64]),
        "core.layers.1.frob": ("F16", [4, 32, 32]),
        "memory": ("F32", [10]),
    }
    profile = read_folder(write_folder(tmp_path, table, {"architectures": ["FrobForCausalLM"]}))
    assert profile.architecture == "FrobForCausalLM"
    assert (profile.parameters, profile.bytes) == (2 * 4096 + 4096 + 10, 2 * 8192 + 8192 + 40)
    assert profile.by_class() == {TensorClass.OTHER: profile.bytes}
    assert "number of layers" in profile.guesses[0]
    assert "'unknown'" in profile.guesses[1]
    assert "size of the KV cache" in profile.guesses[2]


def test_layers_that_the_table_does_not_have(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path, TABLE, CONFIG | {"num_hidden_layers": 3}))
    (guess,) = profile.guesses
    assert "3 layers" in guess
    assert "have 2" in guess
    assert [cache.kind for cache in profile.cache] == ["full", "full", "none"]


def test_layers_beyond_the_config_are_multi_token_prediction(tmp_path: Path) -> None:
    profile = read_folder(write_folder(tmp_path, TABLE, CONFIG | {"num_hidden_layers": 1}))
    assert profile.by_layer()[1].keys() == {TensorClass.MTP}
    assert len(profile.cache) == 1
    assert "multi-token prediction" in profile.guesses[0]
    told = read_folder(write_folder(tmp_path, TABLE, CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    assert told.guesses == ()


def test_an_unknown_type_is_reported(tmp_path: Path) -> None:
    raw = b'{"a.weight":{"dtype":"F3","shape":[8],"data_offsets":[0,3]}}'
    write_raw(tmp_path / "model.safetensors", raw, 3)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    profile = read_folder(tmp_path)
    assert (profile.parameters, profile.bytes, profile.by_type()) == (8, 3, {"F3": 3})
    assert [guess for guess in profile.guesses if "type F3" in guess]


@pytest.mark.parametrize(
    ("files", "model", "template"),
    [
        ({}, None, False),
        ({"tokenizer.json": "{}"}, "tokenizer.json", False),
        ({"tokenizer.model": "x", "chat_template.jinja": "{{ x }}"}, "tokenizer.model", True),
        ({"tiktoken.model": "x", "tokenizer_config.json": '{"chat_template": "{{ x }}"}'}, "tiktoken.model", True),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "tokenizer.json", False),
        ({"tokenizer.json": "{}", "chat_template.json": '{"chat_template": "{{ x }}"}'}, "tokenizer.json", True),
    ],
)
def test_tokenizer_and_chat_template_of_a_folder(
    tmp_path: Path, files: dict[str, str], model: str | None, template: bool
) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG)
    for name, text in files.items():
        (folder / name).write_text(text)
    tokenizer = read_folder(folder).tokenizer
    assert (tokenizer.model, tokenizer.tokens, tokenizer.chat_template) == (model, 100, template)


def _without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _with(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def _cut(name: str, size: int) -> Any:
    return lambda folder: os.truncate(folder / name, size)


INDEX = "model.safetensors.index.json"
BROKEN: list[tuple[str, Any, type[TokenmillError], str]] = [
    ("no config", _without("config.json"), UsageError, "has no config.json"),
    ("empty config", _with("config.json", b""), CorruptModel, "config.json is not valid JSON"),
    ("config is a list", _with("config.json", b"[]"), CorruptModel, "config.json is not a JSON object"),
    ("config is a depth bomb", _with("config.json", b'{"a":' * 100_000), CorruptModel, "config.json is not valid JSON"),
    ("config is not text", _with("config.json", b"\xff\xfe{}"), CorruptModel, "config.json is not valid JSON"),
    ("config has a number of 5000 digits", _with("config.json", b'{"a":' + b"9" * 5000 + b"}"), CorruptModel, "JSON"),
    ("config claims layers", _with("config.json", b'{"num_hidden_layers": 1000000000}'), CorruptModel, "claims"),
    ("tokenizer config is broken", _with("tokenizer_config.json", b"{"), CorruptModel, "tokenizer_config.json"),
    ("quantization file is broken", _with("hf_quant_config.json", b"{"), CorruptModel, "hf_quant_config.json"),
    ("missing shard", _without(PART.format(2)), MissingSplit, PART.format(2)),
    ("cut shard", _cut(PART.format(2), 5000), MissingSplit, PART.format(2)),
    ("empty shard", _cut(PART.format(2), 0), MissingSplit, PART.format(2)),
    ("index is broken", _with(INDEX, b"{"), CorruptModel, INDEX),
    ("index is empty", _with(INDEX, b"{}"), CorruptModel, "no weight_map"),
    ("index maps to nothing", _with(INDEX, b'{"weight_map":{}}'), CorruptModel, "no weight_map"),
    ("index maps to numbers", _with(INDEX, b'{"weight_map":{"a":7}}'), CorruptModel, "'7'"),
    ("index maps to tables", _with(INDEX, b'{"weight_map":{"a":{}}}'), CorruptModel, "weight_map"),
    ("index leaves the folder", _with(INDEX, b'{"weight_map":{"a":"../x.safetensors"}}'), CorruptModel, "'../x"),
    ("index names any file", _with(INDEX, b'{"weight_map":{"a":"/etc/passwd"}}'), CorruptModel, "'/etc/passwd'"),
    (
        "index promises more",
        _with(INDEX, b'{"weight_map":{"a":"' + PART.format(1).encode() + b'"}}'),
        CorruptModel,
        "lacks 1 tensors of the index, such as 'a'",
    ),
]


@pytest.mark.parametrize(("damage", "error", "said"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_errors_of_broken_folders_name_the_fault(
    tmp_path: Path, damage: Any, error: type[TokenmillError], said: str
) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG, shards=3)
    damage(folder)
    with pytest.raises(error) as caught:
        read_folder(folder)
    assert type(caught.value) is error
    assert said in caught.value.message


def test_a_gap_in_numbered_files_is_seen_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG, shards=3, index=False)
    (folder / PART.format(2)).unlink()
    with pytest.raises(MissingSplit, match="00002-of-00003"):
        read_folder(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {}, CONFIG)
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        write_file(folder / name, TABLE)
    with pytest.raises(CorruptModel, match="earlier file"):
        read_folder(folder)


@pytest.mark.parametrize("table", [{}, {"a.weight_scale": ("F32", [1])}])
def test_a_folder_without_weights(tmp_path: Path, table: dict[str, tuple[str, list[int]]]) -> None:
    with pytest.raises(CorruptModel, match="no weights"):
        read_folder(write_folder(tmp_path, table, CONFIG))


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no model at"):
        read_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "said"), [("x.bin", "only \\*.bin"), ("x.gguf", "only \\*.gguf"), ("x.txt", "no safetensors")]
)
def test_a_folder_of_something_else(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=said) as caught:
        read_folder(tmp_path)
    assert caught.value.hint


def test_a_config_that_is_a_folder_or_a_pipe(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, None)
    os.mkfifo(folder / "tokenizer_config.json")
    (folder / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_folder(folder)


def test_an_unreadable_file_is_a_model_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        read_folder(folder)


def test_a_model_of_too_many_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.model.huggingface.safetensors.MAX_ROWS", 10)
    with pytest.raises(CorruptModel, match="more than any model"):
        read_folder(write_folder(tmp_path, TABLE, CONFIG))


def test_a_header_may_carry_metadata(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TABLE, CONFIG)
    write_raw(folder / "model.safetensors", *header(TABLE, {"format": "pt", "config": json.dumps(CONFIG)}))
    assert read_folder(folder).parameters == PARAMETERS
