"""Reads config.json and the small JSON files of a checkpoint.

Values of a wrong type count as missing; callers that need one add a guess to the profile. In multimodal configs the
language model's section takes precedence over the surrounding one.
"""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.errors import CorruptModel, ModelError
from tokenmill.model.profile import Tokenizer

MAX_JSON_BYTES = 64_000_000  # the index of a trillion-parameter checkpoint has about 25 MB
_MAX_DELIMITERS = 5_000_000
_MAX_COUNT = 1 << 40
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model", "vocab.json")


def read_object(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises `ModelError` with the path."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise CorruptModel(f"{path} is not a regular file")
        if info.st_size > MAX_JSON_BYTES:
            raise CorruptModel(f"{path} has {info.st_size} bytes, but at most {MAX_JSON_BYTES} are allowed")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if raw.count(b",") + raw.count(b":") > _MAX_DELIMITERS:
        raise CorruptModel(f"{path} has more than {_MAX_DELIMITERS} entries")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise CorruptModel(f"{path} is not valid JSON", hint="download this file again") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} is not a JSON object", hint="download this file again")
    return value


def printable(value: object) -> str | None:
    """`value` if it is a short printable text, else None."""
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200 else None


class ConfigReader:
    """Typed lookups in a configuration; a value of a wrong type counts as missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, *keys: str) -> int | None:
        """The first value that is a positive integer, or the largest of a list (one per layer)."""
        for key in keys:
            value = self.values.get(key)
            items = value if isinstance(value, list) else (value,)
            if numbers := [item for item in items if type(item) is int and 0 < item <= _MAX_COUNT]:
                return max(numbers)
        return None

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of integers; empty for any other value."""
        value = self.values.get(key)
        valid = isinstance(value, list) and all(type(item) is int and abs(item) <= _MAX_COUNT for item in value)
        return tuple(value) if valid and value else ()

    def words(self, *keys: str) -> tuple[str, ...]:
        """The first value that is a list of texts; empty if there is none."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, list) and value and all(printable(item) for item in value):
                return tuple(value)
        return ()

    def word(self, *keys: str) -> str | None:
        """The first value that is a short text; None if there is none."""
        return next((text for key in keys if (text := printable(self.values.get(key)))), None)

    def flag(self, key: str) -> bool | None:
        """A boolean; None for any other value."""
        value = self.values.get(key)
        return value if isinstance(value, bool) else None

    def part(self, key: str) -> "ConfigReader":
        """A nested table; empty if it is missing."""
        value = self.values.get(key)
        return ConfigReader(value if isinstance(value, Mapping) else {})


def language_model(config: Mapping[str, Any]) -> ConfigReader:
    """The settings of the language model: its section merged over the surrounding ones."""
    merged = dict(config)
    inner = config
    for _ in _PARTS:
        found = next((inner[key] for key in _PARTS if isinstance(inner.get(key), Mapping)), None)
        if found is None:
            break
        merged.update(found)
        inner = found
    return ConfigReader(merged)


def declared_layers(settings: ConfigReader) -> int | None:
    """Number of decoding layers in the config."""
    return settings.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def declared_experts(settings: ConfigReader) -> tuple[int | None, int | None, int | None]:
    """Number of experts, of experts per token, and of shared experts."""
    ffn = settings.part("ffn_config")
    return (
        settings.count("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_moe_experts")
        or ffn.count("moe_num_experts"),
        settings.count(
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_top_k",
            "moe_k",
            "top_k_experts",
            "experts_per_token",
            "num_selected_experts",
        )
        or ffn.count("moe_top_k"),
        settings.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    )


def declared_context(settings: ConfigReader) -> int | None:
    """The longest context that the model was trained for."""
    return settings.count(
        "max_position_embeddings",
        "max_sequence_length",
        "n_positions",
        "seq_length",
        "max_seq_len",
        "n_ctx",
        "model_max_length",
    )


def declared_heads(settings: ConfigReader) -> tuple[int | None, int | None]:
    """Number of query heads, and of KV heads if the config has it."""
    inner = settings.part("attn_config")
    heads = settings.count("num_attention_heads", "n_head", "n_heads", "num_heads") or inner.count("n_heads")
    if settings.flag("multi_query") and not settings.flag("new_decoder_architecture"):
        return heads, 1  # falcon and gpt_bigcode, where num_kv_heads does not apply
    kv_heads = settings.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return heads, kv_heads or inner.count("kv_n_heads")


def tokenizer_in(folder: Path, settings: ConfigReader) -> Tokenizer:
    """The tokenizer and chat template in a folder."""
    model = next((name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    template = (folder / "chat_template.jinja").is_file()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not template and (folder / name).is_file():
            template = bool(read_object(folder / name).get("chat_template"))
    return Tokenizer(model=model, tokens=settings.count("vocab_size", "padded_vocab_size"), chat_template=template)


def state_dtype(settings: ConfigReader) -> str | None:
    """The type of recurrent state in the config; None if it is missing."""
    return settings.word("mamba_ssm_dtype", "mamba_ssm_cache_dtype")


def state_bytes(settings: ConfigReader, family: str) -> int | None:
    """Bytes of one sequence's recurrent state in one layer; None if the config does not contain its size.

    As in vLLM, the state is stored in 32-bit floats unless the config sets 16 bits, and the convolution's last inputs
    in 16 bits like the weights.
    """
    state_size = 2 if (state_dtype(settings) or "").endswith("float16") else 4
    for rule in (_delta_net, _kimi_delta, _mamba2, _mamba1, _short):
        if (sizes := rule(settings, family)) is not None:
            state, convolution = sizes
            return state_size * state + 2 * convolution
    return None


_Sizes = tuple[int, int] | None  # elements of state, elements of the convolution's last inputs


def _delta_net(settings: ConfigReader, _family: str) -> _Sizes:
    k_heads = settings.count("linear_num_key_heads")
    v_heads = settings.count("linear_num_value_heads")
    k_dim = settings.count("linear_key_head_dim")
    v_dim = settings.count("linear_value_head_dim")
    if not (k_heads and v_heads and k_dim and v_dim):
        return None
    tail = (settings.count("linear_conv_kernel_dim") or 1) - 1
    return v_heads * k_dim * v_dim, tail * (2 * k_heads * k_dim + v_heads * v_dim)


def _kimi_delta(settings: ConfigReader, _family: str) -> _Sizes:
    part = settings.part("linear_attn_config")
    heads = part.count("num_heads")
    dim = part.count("head_dim")
    if not (heads and dim):
        return None
    tail = (part.count("short_conv_kernel_size") or 1) - 1
    return heads * dim * dim, tail * 3 * heads * dim


def _mamba2(settings: ConfigReader, family: str) -> _Sizes:
    # num_heads and head_dim mean attention heads in other families
    heads = settings.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", *(["num_heads"] * (family == "mamba2")))
    dim = settings.count("mamba_head_dim", "mamba_d_head", "mamba_headdim", *(["head_dim"] * (family == "mamba2")))
    state = settings.count("ssm_state_size", "mamba_d_state", "state_size")
    if heads and not dim and (hidden := settings.count("hidden_size")):  # mamba_d_head: "auto"
        dim = (settings.count("mamba_d_ssm") or hidden * (settings.count("mamba_expand", "expand") or 2)) // heads
    if not (heads and dim and state):
        return None
    groups = settings.count("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    tail = (settings.count("mamba_d_conv", "conv_kernel") or 1) - 1
    return heads * dim * state, tail * (heads * dim + 2 * groups * state)


def _mamba1(settings: ConfigReader, family: str) -> _Sizes:
    state = settings.count("mamba_d_state", "state_size")
    hidden = settings.count("hidden_size")
    if not (state and hidden):
        return None
    inner = settings.count("intermediate_size") if family in ("mamba", "falcon_mamba") else None
    inner = inner or hidden * (settings.count("mamba_expand", "expand") or 2)
    tail = (settings.count("mamba_d_conv", "conv_kernel") or 1) - 1
    return inner * state, tail * inner


def _short(settings: ConfigReader, family: str) -> _Sizes:
    """lfm2's convolutions, RecurrentGemma's linear unit and MiniMax's lightning attention."""
    hidden = settings.count("hidden_size")
    if hidden and (cache := settings.count("conv_L_cache")):
        return 0, hidden * (cache - 1)
    if family == "recurrent_gemma" and (width := settings.count("lru_width") or hidden):
        return width, width * ((settings.count("conv1d_width") or 1) - 1)
    heads = settings.count("num_attention_heads")
    dim = settings.count("head_dim")
    if heads and (family.startswith("minimax") or settings.numbers("attn_type_list")):
        dim = dim or (hidden or 0) // heads
        return heads * dim * dim, 0
    return None
