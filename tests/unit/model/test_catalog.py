"""Names, sizes of published files, and equality of catalogue models and their ghosts."""

from pathlib import Path

import pytest

from tokenmill.errors import UnknownModel
from tokenmill.model import catalog, quant_mix
from tokenmill.model.gguf import LongArray, read_header
from tokenmill.model.read import read
from tokenmill.model.synthetic import ghost
from tokenmill.model.tensor_types import tensor_bytes
from tokenmill.units import GIB

# What published files weigh in GiB, and how close the catalogue must come. Files made with per-tensor overrides differ
# a little from llama-quantize's own mix. "llama-bench": the size column of its tables in public issue threads.
PUBLISHED = [
    # the seeds' own figures
    ("kimi-k2.5:Q4_K_M", 578.57, 0.01),  # 578.57 GiB, 4.84 bpw: an upload with overrides, 0.1 % over the mix
    ("kimi-k2.5:Q4_K_S", 539, 0.01),  # file near 539 GiB, as Q4_K throughout; the mix raises six layers to Q5_K
    ("llama-4-scout:nvfp4", 63.5, 0.01),  # about 63.5 GiB of weights in vLLM
    # others
    ("kimi-k2.5:Q4_X", 543.617, 0.0001),  # model card of ubergarm/Kimi-K2-Thinking-GGUF (same shape): 4.549 bpw
    ("llama-4-scout:Q4_K_M", 60.86, 0.001),  # llama-bench
    ("llama-4-scout:Q6_K", 82.35, 0.001),  # llama-bench
    ("llama-4-maverick:Q4_K_M", 243e9 / GIB, 0.01),  # unsloth/Llama-4-Maverick-17B-128E-Instruct-GGUF: 243 GB
    ("deepseek-v3:Q4_K_M", 376.65, 0.001),  # github.com/ikawrakow/ik_llama.cpp/pull/259; kv_b not yet split there
    ("qwen3-235b-a22b:Q4_K_M", 132.39, 0.001),  # llama-bench
    ("gpt-oss-120b:MXFP4", 59.02, 0.001),  # github.com/ggml-org/llama.cpp/pull/19922
    ("gpt-oss-120b:F16", 60.87, 0.001),  # llama-bench
    ("llama-3.3-70b:Q4_K_M", 39.59, 0.001),  # llama-bench
    ("qwen3-32b:Q4_K_M", 18.40, 0.001),  # llama-bench
    # recipes of the field, with the sizes that their authors state
    ("deepseek-r1:IQ3_KT", 272.527, 0.005),  # github.com/ikawrakow/ik_llama.cpp/pull/529, with attn_kv_b
    ("llama-4-scout:IQ4_KS", 54.003, 0.001),  # github.com/ikawrakow/ik_llama.cpp/pull/321
    ("glm-4.5-air:IQ3_KS", 49.072, 0.005),  # github.com/ikawrakow/ik_llama.cpp/pull/624
]


@pytest.mark.parametrize(("name", "published", "within"), PUBLISHED)
def test_sizes_agree_with_published_files(name: str, published: float, within: float) -> None:
    size = sum(tensor.bytes for tensor in catalog.header(name).tensors) / GIB
    assert abs(size - published) / published <= within


@pytest.mark.parametrize(
    ("up", "down", "published"),
    # model card of AesSedai/GLM-4.5-GGUF: Q6_K with routed experts as named, 128.18 and 129.57 GiB
    [("IQ2_S", "IQ3_S", 128.18), ("Q2_K", "Q3_K", 129.57)],
)
def test_a_published_recipe_for_glm_gives_its_published_size(up: str, down: str, published: float) -> None:
    entry = catalog.entry("glm-4.5").model
    slots = entry.slots()
    types = quant_mix.choose("Q6_K", slots, entry.traits(), {"ffn_(up|gate)_exps": up, "ffn_down_exps": down})
    size = sum(tensor_bytes(kind, shape) for (_, shape), kind in zip(slots, types, strict=True)) / GIB
    assert abs(size - published) / published <= 0.01


def test_bits_per_weight_are_those_the_seeds_state() -> None:
    assert round(read("kimi-k2.5:Q4_K_M").bits_per_weight, 2) == 4.84


@pytest.mark.parametrize("name", ["kimi-k2.5:Q4_X", "llama-4-scout:nvfp4", "qwen3-32b:q4_k_m"])
def test_every_listed_name_has_a_header_that_fits_together(name: str) -> None:
    header = catalog.header(name)
    words = catalog.entry(name.partition(":")[0]).model.words
    tokens = header.keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, LongArray)
    assert tokens.count == words.tokens
    assert all(0 <= token < words.tokens for token in words.ids.values())
    assert all(0 <= token < words.tokens for token in words.special.values())
    assert header.file_bytes == header.data_offset + header.tensors[-1].offset + -(-header.tensors[-1].bytes // 32) * 32


@pytest.mark.parametrize("name", ["kimi-k2.5:Q4_K_S", "llama-4-scout:nvfp4", "glm-4.5:Q4_K_M", "gpt-oss-120b:MXFP4"])
def test_a_name_and_its_ghost_on_disk_are_the_same_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    ghost.write(name, path)
    on_disk, by_name = read_header(path), catalog.header(name)
    assert on_disk.tensors == by_name.tensors
    assert (on_disk.file_bytes, on_disk.data_offset) == (by_name.file_bytes, by_name.data_offset)
    assert on_disk.key_bytes == by_name.key_bytes
    assert on_disk.keys == {**by_name.keys, catalog.GHOST_KEY: True}
    from_disk, from_name = read(path), read(name)
    assert (from_disk.ghost, from_name.ghost) == (True, False)
    assert (from_disk.format, from_name.format) == ("gguf", "catalog")
    for field in ("tensors", "cache", "experts", "layers", "tokenizer", "training_context", "guesses"):
        assert getattr(from_disk, field) == getattr(from_name, field), field


def test_names_are_found_whatever_their_case() -> None:
    assert catalog.resolve("Kimi-K2.5:q4_k_s") == ("kimi-k2.5", "Q4_K_S")
    assert catalog.resolve("llama-4-scout:NVFP4") == ("llama-4-scout", "nvfp4")
    assert catalog.resolve("gpt-oss-120b:mxfp4") == ("gpt-oss-120b", "MXFP4")


@pytest.mark.parametrize(
    ("name", "hinted"),
    [
        ("kimi-k9:Q4_K_S", "kimi-k2.5"),
        ("kimi-k2.5", "kimi-k2.5:Q4_K_S"),
        ("kimi-k2.5:", "kimi-k2.5:Q4_K_S"),
        ("kimi-k2.5:Q4_K_XL", "Q4_X, F32"),
        ("", "kimi-k2.5"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(name: str, hinted: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        catalog.header(name)
    assert hinted in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kimi-k2.5:Q4_K_S", True),
        ("kimi-k2.5", True),
        ("model.gguf", False),
        ("models/kimi", False),
        ("./kimi-k2.5", False),
        ("model.SAFETENSORS", False),
        ("a:b:c", False),
    ],
)
def test_names_and_paths_are_distinguished(text: str, expected: bool) -> None:
    assert catalog.looks_like_name(text) is expected


@pytest.mark.parametrize("name", ["kimi-k2.5:Q4_X", "llama-4-scout:nvfp4", "qwen3-32b:q4_k_m"])
def test_the_quantization_is_the_one_asked_for(name: str) -> None:
    assert read(name).quantisation == catalog.resolve(name)[1]


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("kimi-k2.5:Q4_K_S", "unsloth/Kimi-K2.5-GGUF:Q4_K_S"),
        ("Kimi-K2.5:q4_x", "AesSedai/Kimi-K2.5-GGUF:q4_x"),
        ("kimi-k2.6:Q4_X", "OWNER/REPO:Q4_X"),
        ("glm-4.5", "unsloth/GLM-4.5-GGUF:QUANT"),
    ],
)
def test_a_hint_names_the_repository(name: str, repository: str) -> None:
    assert catalog.pull_hint(name) == f"tokenmill models pull hf:{repository}"


def test_gpt_oss_keeps_its_experts_in_every_quantisation() -> None:
    for quant in ("MXFP4", "F16", "Q8_0", "Q4_K_M", "IQ2_M"):
        experts = {t.type for t in catalog.header(f"gpt-oss-120b:{quant}").tensors if t.name.endswith("_exps.weight")}
        assert experts == {"MXFP4"}, quant


def test_nvfp4_experts_carry_a_scale_for_each_expert() -> None:
    tensors = {tensor.name: tensor for tensor in catalog.header("llama-4-scout:nvfp4").tensors}
    assert tensors["blk.3.ffn_up_exps.weight"].type == "NVFP4"
    assert tensors["blk.3.ffn_up_exps.scale"].shape == (16,)
    assert tensors["blk.3.ffn_up_shexp.scale"].shape == (1,)
    assert tensors["blk.3.attn_q.weight"].type == "BF16"
    assert "blk.3.attn_q.scale" not in tensors
