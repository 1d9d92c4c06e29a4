"""Derives the KV cache of each layer from a GGUF file's keys.

Ordinary attention, multi-head latent attention, sliding windows, chunks and recurrent state follow llama.cpp's
interpretation of the keys. Unknown architectures are treated as ordinary attention, which is reported as a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenmill.model.gguf import MetadataValue
from tokenmill.model.profile import LayerCache

# Architectures with sliding windows: (one layer in N has full attention, it is the first of them, default window).
# From llama.cpp's model loaders; a `sliding_window_pattern` in the file overrides them.
_WINDOWS: dict[str, tuple[int, bool, int | None]] = {
    "gpt-oss": (2, False, None),
    "gemma2": (2, False, 4096),
    "gemma3": (6, False, None),
    "gemma3n": (5, False, None),
    "cohere2": (4, False, None),
    "cohere2moe": (4, True, None),
    "exaone4": (4, False, None),
    "exaone-moe": (4, False, None),
    "olmo2": (4, False, None),
    "afmoe": (4, False, None),
    "plamo3": (8, False, None),
    "smallthinker": (4, True, None),
    "laguna": (4, True, None),
    "mellum": (4, False, None),
    "llama4": (4, False, 8192),
}
# llama.cpp ignores the key and uses full attention
_WINDOW_IGNORED = frozenset({"phi3", "phimoe", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "mistral3"})
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_ONE_PART_PER_LAYER = frozenset({"nemotron_h", "nemotron_h_moe"})  # a mixer or a feed-forward network
_EVERY_FOURTH_FULL = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
_ORDINARY = frozenset(
    {
        "llama",
        "deci",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen3moe",
        "qwen2vl",
        "qwen3vl",
        "qwen3vlmoe",
        "glm4",
        "glm4moe",
        "minimax-m2",
        "minimax-m3",
        "mistral3",
        "mistral4",
        "phi2",
        "phi3",
        "phimoe",
        "starcoder2",
        "command-r",
        "gemma",
        "granite",
        "granitemoe",
        "olmo",
        "olmoe",
        "dbrx",
        "grok",
        "arctic",
        "dots1",
        "ernie4_5",
        "ernie4_5-moe",
        "hunyuan-moe",
        "hunyuan-dense",
        "bailingmoe",
        "bailingmoe2",
        "smollm3",
        "seed_oss",
        "internlm2",
        "stablelm",
        "falcon",
        "gpt2",
        "apertus",
        "deepseek",
        "chatglm",
        "exaone",
        "nemotron",
        "baichuan",
        "orion",
        "xverse",
        "minicpm",
        "gptneox",
    }
)
_LATENT = frozenset({"deepseek2", "deepseek32", "glm-dsa", "minicpm3", "plm", "kimi-linear", "kimi-k3", "bailingmoe3"})
_INDEXED = frozenset({"deepseek32", "glm-dsa"})
_INDEXED_RATIO = 4  # tokens per compressed cell in layers that choose among their cells
_SHARED_INDEX_CONTEXT = 1 << 20  # from GLM-5.2 on, most layers have no index; files without the key are told by this


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of every layer, and the assumptions behind it as sentences."""

    layers: tuple[LayerCache, ...]
    guesses: tuple[str, ...] = ()
    prediction: tuple[LayerCache, ...] = ()  # of the layers for multi-token prediction


class _Keys:
    """Integer keys of one architecture, for one layer; arrays have one value per layer."""

    def __init__(self, keys: Mapping[str, MetadataValue], architecture: str) -> None:
        self._keys = keys
        self._prefix = f"{architecture}."

    def number(self, name: str, layer: int = 0) -> int | None:
        value = self._keys.get(self._prefix + name)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else None
        return int(value) if isinstance(value, int) and value >= 0 else None  # bool patterns count as 0 and 1

    def is_array(self, name: str) -> bool:
        return isinstance(self._keys.get(self._prefix + name), tuple)


def layout(keys: Mapping[str, MetadataValue], architecture: str, layers: int) -> CacheLayout:
    """Derive the cache of `layers` layers."""
    values = _Keys(keys, architecture)
    guesses = []
    if not (
        architecture in _ORDINARY
        or architecture in _LATENT
        or architecture in _RECURRENT
        or architecture in _WINDOWS
        or architecture in _EVERY_FOURTH_FULL
        or architecture in _ONE_PART_PER_LAYER
        or architecture in ("deepseek4", "minimax-m3")
    ):
        guesses.append(f"architecture {architecture!r} is unknown, so its cache is derived from the keys alone")
    if _is_latent_of_2025(values, architecture):
        guesses.append(
            "the file has the latent-attention keys of early 2025, without key_length_mla: planned as latent "
            "attention, as ik_llama.cpp runs it; llama.cpp needs a newer conversion for that"
        )
    found = tuple(_layer(values, architecture, index) for index in range(layers))
    if any(layer is None for layer in found):
        guesses.append("the keys do not determine the size of the KV cache, so it counts as 0")
    predicting = range(layers, layers + (values.number("nextn_predict_layers") or 0))
    # they do not use sparse attention
    prediction = tuple(
        replace(_attention(values, architecture, index) or LayerCache("none"), indexer_elements=0, indexer_top_k=0)
        for index in predicting
    )
    return CacheLayout(tuple(layer or LayerCache("none") for layer in found), tuple(guesses), prediction)


def _is_latent_of_2025(keys: _Keys, architecture: str) -> bool:
    lora = keys.number("attention.kv_lora_rank")
    return architecture in _LATENT and bool(lora) and not keys.number("attention.key_length_mla")


def _layer(keys: _Keys, architecture: str, index: int) -> LayerCache | None:
    only_feeds_forward = architecture in _ONE_PART_PER_LAYER and keys.number("feed_forward_length", index)
    if not only_feeds_forward and _is_recurrent(keys, architecture, index):
        return LayerCache("recurrent", state_bytes=_state_bytes(keys))
    if only_feeds_forward or keys.number("attention.head_count_kv", index) == 0:
        return LayerCache("none")
    if architecture == "deepseek4":
        return _compressed(keys, index)
    found = _attention(keys, architecture, index)
    if found is not None and architecture == "minimax-m3" and index >= (keys.number("leading_dense_block_count") or 0):
        # llama.cpp's cache for the keys of the index has a row of values, too
        return replace(found, indexer_elements=2 * (keys.number("attention.indexer.key_length") or 0))
    return found


def _attention(keys: _Keys, architecture: str, index: int) -> LayerCache | None:
    """Latent, windowed or ordinary attention; None if the keys do not determine its size."""
    lora = keys.number("attention.kv_lora_rank", index)
    rope = keys.number("rope.dimension_count", index)
    if lora and rope and architecture in _LATENT:
        return LayerCache("latent", lora + rope, lora, **_index(keys, architecture, index))
    heads = keys.number("attention.head_count", index)
    kv_heads = keys.number("attention.head_count_kv", index)
    kv_heads = heads if kv_heads is None else kv_heads
    span = _span(keys, architecture, index)
    k_length, v_length = _head_lengths(keys, heads, windowed=span is not None)
    if kv_heads is None or k_length is None or v_length is None:
        return None
    kind = "full" if span is None else "chunked" if architecture == "llama4" else "window"
    if architecture == "minimax-m3" and index >= (keys.number("leading_dense_block_count") or 0):
        # its cache of index keys also has a row of values, which is never used
        indexer = (keys.number("attention.indexer.key_length") or 0) + v_length
        return LayerCache("full", kv_heads * k_length, kv_heads * v_length, indexer_elements=indexer)
    return LayerCache(kind, kv_heads * k_length, kv_heads * v_length, span_tokens=span)  # type: ignore[arg-type]


def _compressed(keys: _Keys, index: int) -> LayerCache:
    """A layer of DeepSeek-V4: a window, and compressed cells of 4 tokens (with an index) or of 128."""
    size = keys.number("attention.key_length") or 0
    span = keys.number("attention.sliding_window")
    ratio = keys.number("attention.compress_ratios", index) or 0
    overlapping = ratio == _INDEXED_RATIO  # cells of 4 tokens overlap, so twice the tokens and widths are kept
    indexer = (keys.number("attention.indexer.key_length") or 0) if overlapping else 0
    factor = 2 if overlapping else 1
    state = 2 * 4 * factor * ratio * factor * (size + indexer)  # K and its score, in 32 bits
    return LayerCache("compressed", size, 0, span, state, indexer, ratio)


def _index(keys: _Keys, architecture: str, index: int) -> dict[str, int]:
    """The index of a layer with sparse attention; layers without one use the choice of the layer before them."""
    if architecture not in _INDEXED:
        return {}
    own = keys.number("attention.indexer.types", index)
    if own is None:
        shares = architecture == "glm-dsa" and (keys.number("context_length") or 0) >= _SHARED_INDEX_CONTEXT
        own = not shares or index < 2 or (index - 2) % 4 == 0
    size = keys.number("attention.indexer.key_length") or 0
    return {
        "indexer_elements": size if own else 0,
        "indexer_top_k": keys.number("attention.indexer.top_k") or 0,
    }


def _head_lengths(keys: _Keys, heads: int | None, *, windowed: bool) -> tuple[int | None, int | None]:
    embedding = keys.number("embedding_length")
    default = embedding // heads if embedding and heads else None
    suffix = "_swa" if windowed and keys.number("attention.key_length_swa") else ""
    k_length = keys.number(f"attention.key_length{suffix}")
    v_length = keys.number(f"attention.value_length{suffix}")
    return (default if k_length is None else k_length), (default if v_length is None else v_length)


def _span(keys: _Keys, architecture: str, index: int) -> int | None:
    """Number of tokens that the layer attends to; None: all."""
    every, full_first, default = _WINDOWS.get(architecture, (0, False, None))
    window = keys.number("attention.sliding_window")
    if window is None:
        window = default
    if not window or architecture in _WINDOW_IGNORED:
        return None
    if keys.is_array("attention.sliding_window_pattern"):
        return window if keys.number("attention.sliding_window_pattern", index) else None
    every = keys.number("attention.sliding_window_pattern") or every
    if not every:
        return None
    full = index % every == (0 if full_first else every - 1)
    return None if full else window


def _is_recurrent(keys: _Keys, architecture: str, index: int) -> bool:
    if architecture in _RECURRENT:
        return True
    if keys.is_array("attention.recurrent_layers"):
        return bool(keys.number("attention.recurrent_layers", index))
    if architecture in _EVERY_FOURTH_FULL:
        return (index + 1) % (keys.number("full_attention_interval") or 4) != 0
    has_state = keys.number("ssm.state_size") or keys.number("kda.head_dim") or keys.number("shortconv.l_cache")
    return bool(has_state) and keys.number("attention.head_count_kv", index) == 0


def _state_bytes(keys: _Keys) -> int:
    """Bytes of one sequence's recurrent state in one layer, which llama.cpp stores in 32-bit floats."""
    embedding = keys.number("embedding_length") or 0
    heads = keys.number("attention.head_count") or 0
    if wkv := keys.number("wkv.head_size"):
        shift = keys.number("token_shift_count") or 2
        return 4 * (shift * embedding + embedding * wkv)
    if cache := keys.number("shortconv.l_cache"):
        return 4 * embedding * (cache - 1)
    convolution = keys.number("ssm.conv_kernel") or 0
    if head := keys.number("kda.head_dim"):
        return 4 * (3 * max(convolution - 1, 0) * heads * head + head * head * heads)
    inner = keys.number("ssm.inner_size") or 0
    state = keys.number("ssm.state_size") or 0
    groups = keys.number("ssm.group_count") or 0
    return 4 * (max(convolution - 1, 0) * (inner + 2 * groups * state) + state * inner)
