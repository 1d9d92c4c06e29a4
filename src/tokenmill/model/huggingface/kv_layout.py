"""Derives the KV cache of each layer of a Hugging Face model from config.json and the projections' shapes.

The kind of each layer (full attention, window, chunk, recurrent) comes from the config. The widths of K and V are those
of `k_proj` and `v_proj` if these exist, so that layers can differ. Unknown families are treated as ordinary attention,
which is reported as a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Literal

from tokenmill.model.huggingface.config import ConfigReader, declared_context, declared_heads, state_bytes, state_dtype
from tokenmill.model.kv_layout import CacheLayout
from tokenmill.model.profile import LayerCache

LayerKind = Literal[
    "full", "window", "chunked", "recurrent", "both", "none"
]  # both: attention and a state side by side

_KNOWN = frozenset(
    {
        "llama",
        "llama4",
        "mistral",
        "mistral3",
        "ministral3",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "phi",
        "phi3",
        "phimoe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "kimi_k2",
        "kimi_linear",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_oss",
        "gpt_neox",
        "gpt_bigcode",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "starcoder2",
        "cohere",
        "cohere2",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "minimax_m2",
        "nemotron_h",
        "jamba",
        "bamba",
        "mamba",
        "mamba2",
        "dbrx",
        "ernie4_5",
        "ernie4_5_moe",
        "internlm2",
        "internlm3",
        "exaone4",
        "seed_oss",
        "smollm3",
        "stablelm",
        "lfm2",
        "lfm2_moe",
        "dots1",
        "arcee",
        "apertus",
        "recurrent_gemma",
        "hunyuan_v1_moe",
        "hunyuan_v1_dense",
        "helium",
        "chatglm",
        "baichuan",
        "bailing_moe",
        "mimo",
        "mimo_v2_flash",
        "minicpm",
        "opt",
        "aria",
        "bitnet",
        "bloom",
        "codegen",
        "gptj",
        "persimmon",
        "vaultgemma",
        "granitemoeshared",
        "flex_olmo",
        "glm4v",
        "glm4v_moe",
        "minimax",
        "minimax_text_01",
    }
)
_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "global": "full",
    "full": "full",
    "sliding_attention": "window",
    "sliding_window": "window",
    "local_attention": "window",
    "local": "window",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "recurrent": "recurrent",
    "conv": "recurrent",
    "short_conv": "recurrent",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
_LETTERS: Mapping[str, LayerKind] = {
    "M": "recurrent",
    "*": "full",
    "-": "none",
    "E": "none",
    "L": "window",
    "G": "full",
}
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "cohere2": 4, "gemma3n": 5}
_WINDOW_EVERYWHERE = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe", "ministral3"})
_NO_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7", "xlstm"})


@dataclass(frozen=True, slots=True)
class Projections:
    """Facts about attention from the tensor table, by layer."""

    k_rows: Mapping[int, int] = field(default_factory=dict)  # rows of `k_proj`
    v_rows: Mapping[int, int] = field(default_factory=dict)  # rows of `v_proj`
    query_only: frozenset[int] = frozenset()  # layers that project queries but no keys or values
    stateful: frozenset[int] = frozenset()  # layers with a recurrence or convolution and no projected queries or keys
    attending: frozenset[int] = frozenset()  # layers with any tensor of class attention


def layout(settings: ConfigReader, layers: int, seen: Projections) -> CacheLayout:
    """Derive the cache of all decoding layers."""
    family = (settings.word("model_type") or "").removesuffix("_text")
    guesses = []
    if family not in _KNOWN:
        guesses.append(f"model type {family or 'unknown'!r} is unknown, so its cache is derived from the config alone")
    kinds, doubt = _kinds(settings, family, layers)
    shared = settings.count("num_kv_shared_layers") or 0  # the last layers use keys and values of earlier ones
    for index in range(layers):
        if index >= layers - shared or (seen.attending and index not in seen.attending):
            kinds[index] = "none"
        elif index in seen.stateful and kinds[index] != "none":
            kinds[index] = "recurrent"
    state = state_bytes(settings, family)
    if {"recurrent", "both"} & set(kinds):
        doubt += _state_doubts(settings, state)
    found = [_layer(settings, kind, index, seen, state or 0) for index, kind in enumerate(kinds)]
    if None in found:
        doubt.append("config and tensors do not determine the size of the KV cache, so it counts as 0")
    return CacheLayout(tuple(cache or LayerCache("none") for cache in found), (*guesses, *doubt))


def _state_doubts(settings: ConfigReader, state: int | None) -> list[str]:
    if state is None:
        return ["the config does not determine the size of the recurrent state, so it counts as 0"]
    if state_dtype(settings) is None:
        return ["recurrent state is assumed to be in 32-bit floats, but the engine may use 16 bits"]
    return []


def _layer(settings: ConfigReader, kind: LayerKind, index: int, seen: Projections, state: int) -> LayerCache | None:
    """One layer's cache; None if its size is unknown."""
    if kind == "none" or (index in seen.query_only and seen.k_rows and kind != "recurrent"):
        return LayerCache("none")  # no attention, or the keys and values of an earlier layer
    if kind == "recurrent":
        return LayerCache("recurrent", state_bytes=state)
    cache = _attention(settings, index, seen)
    if cache is None:
        return None
    if kind == "both":
        return replace(cache, state_bytes=state)
    span = _span(settings, kind)
    return cache if span is None or kind == "full" else replace(cache, kind=kind, span_tokens=span)


def _attention(settings: ConfigReader, index: int, seen: Projections) -> LayerCache | None:
    if lora := settings.count("kv_lora_rank"):
        rope = settings.count("qk_rope_head_dim") or 0
        indexer = (settings.count("index_head_dim") or 0) if settings.count("index_topk") else 0
        return LayerCache("latent", lora + rope, lora, indexer_elements=indexer)
    k_rows = seen.k_rows.get(index)
    v_rows = seen.v_rows.get(index)
    if k_rows:
        return LayerCache("full", k_rows, v_rows or k_rows)
    heads, kv_heads = declared_heads(settings)
    hidden = settings.count("hidden_size", "n_embd", "d_model")
    head_dim = settings.count("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    kv_heads = kv_heads or heads
    if not kv_heads or not head_dim:
        return None
    return LayerCache("full", kv_heads * head_dim, kv_heads * (settings.count("v_head_dim") or head_dim))


def _span(settings: ConfigReader, kind: LayerKind) -> int | None:
    """Number of tokens that a windowed or chunked layer attends to; None if it is the whole context."""
    if kind == "chunked":
        span = settings.count("attention_chunk_size")
    else:
        span = settings.count("sliding_window", "attention_window_size", "sliding_window_size")
    context = declared_context(settings)
    return None if span and context and span >= context else span


def _kinds(settings: ConfigReader, family: str, layers: int) -> tuple[list[LayerKind], list[str]]:
    """The kind of each layer, and guesses."""
    listed = settings.words("layer_types", "layers_block_type")
    if listed:
        strange = sorted({word for word in listed[:layers] if word not in _KINDS})
        doubt = [f"layers of unknown type {', '.join(strange)} count as full attention"] if strange else []
        if len(listed) < layers:
            doubt.append(
                f"the config lists types of {len(listed)} of {layers} layers; the others count as full attention"
            )
        found: list[LayerKind] = [_KINDS.get(word, "full") for word in listed[:layers]]
        return found + ["full"] * (layers - len(found)), doubt
    for rule in (_by_letters, _by_numbers, _by_index, _by_interval):
        if kinds := rule(settings, layers):
            return kinds, []
    if family in _NO_ATTENTION:
        return ["recurrent"] * layers, []
    if family == "falcon_h1":
        return ["both"] * layers, []
    return _by_window(settings, family, layers)


def _by_letters(settings: ConfigReader, layers: int) -> list[LayerKind] | None:
    """Kinds as letters, such as M-M*E (nemotron_h) and LLLG (exaone4)."""
    letters = settings.word("hybrid_override_pattern", "sliding_window_pattern")
    if not letters or not set(letters) <= set(_LETTERS):
        return None
    return [_LETTERS[letter] for letter in islice(cycle(letters), layers)]


def _by_numbers(settings: ConfigReader, layers: int) -> list[LayerKind] | None:
    """Kinds as a list of 0 and 1: attention in MiniMax, windows in MiMo, rotary positions in Llama 4."""
    names: tuple[tuple[str, LayerKind, LayerKind], ...] = (
        ("attn_type_list", "recurrent", "full"),
        ("hybrid_layer_pattern", "full", "window"),
    )
    if settings.count("attention_chunk_size"):
        names += (("no_rope_layers", "full", "chunked"),)
    for key, zero, one in names:
        values = settings.numbers(key)
        if len(values) >= layers and set(values) <= {0, 1}:
            return [one if value else zero for value in values[:layers]]
    return None


def _by_index(settings: ConfigReader, layers: int) -> list[LayerKind] | None:
    """Kinds as a list of layers with full attention or, in Kimi Linear, of linear ones counted from 1."""
    linear = settings.part("linear_attn_config").numbers("kda_layers")
    if linear:
        return ["recurrent" if index + 1 in set(linear) else "full" for index in range(layers)]
    full = settings.numbers("attn_layer_indices")
    return ["full" if index in set(full) else "recurrent" for index in range(layers)] if full else None


def _by_interval(settings: ConfigReader, layers: int) -> list[LayerKind] | None:
    if period := settings.count("attn_layer_period"):
        offset = settings.count("attn_layer_offset") or 0
        return ["full" if index % period == offset else "recurrent" for index in range(layers)]
    if interval := settings.count("full_attention_interval"):
        return ["full" if (index + 1) % interval == 0 else "recurrent" for index in range(layers)]
    if blocks := settings.words("block_types"):  # recurrent_gemma, whose attention is always local
        cycled = islice(cycle(blocks), layers)
        return ["window" if word == "attention" else "recurrent" for word in cycled]
    if settings.count("attention_chunk_size"):
        interval = settings.count("no_rope_layer_interval") or 4
        return ["full" if (index + 1) % interval == 0 else "chunked" for index in range(layers)]
    return None


def _by_window(settings: ConfigReader, family: str, layers: int) -> tuple[list[LayerKind], list[str]]:
    full: list[LayerKind] = ["full"] * layers
    if settings.count("sliding_window") is None or settings.flag("use_sliding_window") is False:
        return full, []
    if settings.flag("use_sliding_window"):
        first = settings.count("max_window_layers") or 0
        return ["window" if index >= first else "full" for index in range(layers)], []
    if every := settings.count("sliding_window_pattern", "_sliding_window_pattern") or _FULL_EVERY.get(family):
        return ["full" if (index + 1) % every == 0 else "window" for index in range(layers)], []
    if family in _WINDOW_EVERYWHERE:
        return ["window"] * layers, []
    return full, ["the config has a sliding window but not its layers, so all layers count as full attention"]
