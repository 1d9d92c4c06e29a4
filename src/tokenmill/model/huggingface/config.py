"""Reads config.json and the small JSON files of a checkpoint.

Values of a wrong type count as absent; callers record a guess in the profile if they need one. In multimodal configs
the language model's section takes precedence over the surrounding one.
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
    """Read one JSON object; raises ModelError naming the file."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise CorruptModel(f"{path} is not a regular file")
        if info.st_size > MAX_JSON_BYTES:
            raise CorruptModel(f"{path} has {info.st_size} bytes, too many for such a file")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if raw.count(b",") + raw.count(b":") > _MAX_DELIMITERS:
        raise CorruptModel(f"{path} has too many entries to be real")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise CorruptModel(f"{path} is not valid JSON", hint="fetch this file again") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} is not a JSON object", hint="fetch this file again")
    return value


def printable(value: object) -> str | None:
    """A short text that is safe to show, or None."""
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200 else None


class ConfigReader:
    """Typed lookups in a configuration; a value of a wrong type counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, *keys: str) -> int | None:
        """The first of these that is a positive integer; of a list (one per layer) the largest."""
        for key in keys:
            value = self.values.get(key)
            items = value if isinstance(value, list) else (value,)
            if numbers := [item for item in items if type(item) is int and 0 < item <= _MAX_COUNT]:
                return max(numbers)
        return None

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of integers; empty where it is anything else."""
        value = self.values.get(key)
        valid = isinstance(value, list) and all(type(item) is int and abs(item) <= _MAX_COUNT for item in value)
        return tuple(value) if valid and value else ()

    def words(self, *keys: str) -> tuple[str, ...]:
        """The first of these that is a list of texts; empty where none is."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, list) and value and all(printable(item) for item in value):
                return tuple(value)
        return ()

    def word(self, *keys: str) -> str | None:
        """The first of these that is a short text."""
        return next((text for key in keys if (text := printable(self.values.get(key)))), None)

    def flag(self, key: str) -> bool | None:
        """True or False where the config says so."""
        value = self.values.get(key)
        return value if isinstance(value, bool) else None

    def part(self, key: str) -> "ConfigReader":
        """A nested table; empty where there is none."""
        value = self.values.get(key)
        return ConfigReader(value if isinstance(value, Mapping) else {})


def language_model(config: Mapping[str, Any]) -> ConfigReader:
    """The language model's settings: its own part laid over what surrounds it."""
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
    """Layers that decode, as the config counts them."""
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
    """The longest context that the model was made for."""
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
    """Query heads, and key-value heads where the config names them."""
    inner = settings.part("attn_config")
    heads = settings.count("num_attention_heads", "n_head", "n_heads", "num_heads") or inner.count("n_heads")
    if settings.flag("multi_query") and not settings.flag("new_decoder_architecture"):
        return heads, 1  # falcon and gpt_bigcode; falcon's num_kv_heads is meaningless then
    kv_heads = settings.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return heads, kv_heads or inner.count("kv_n_heads")


def tokenizer_in(folder: Path, settings: ConfigReader) -> Tokenizer:
    """What the folder carries to turn text into tokens and messages into text."""
    model = next((name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    template = (folder / "chat_template.jinja").is_file()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not template and (folder / name).is_file():
            template = bool(read_object(folder / name).get("chat_template"))
    return Tokenizer(model=model, tokens=settings.count("vocab_size", "padded_vocab_size"), chat_template=template)


def state_dtype(settings: ConfigReader) -> str | None:
    """The type the config wants the state kept in, where it says."""
    return settings.word("mamba_ssm_dtype", "mamba_ssm_cache_dtype")


def state_bytes(settings: ConfigReader, family: str) -> int | None:
    """Bytes of one sequence's recurrent state in one layer; None where the config does not say.

    The state proper is counted in 32-bit floats unless the config says 16, the convolution's tail in the
    weights' 16 bits, as vLLM keeps them.
    """
    state_size = 2 if (state_dtype(settings) or "").endswith("float16") else 4
    for rule in (_delta_net, _kimi_delta, _mamba2, _mamba1, _short):
        if (sizes := rule(settings, family)) is not None:
            state, convolution = sizes
            return state_size * state + 2 * convolution
    return None


_Sizes = tuple[int, int] | None  # elements of state, elements of the convolution's tail


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
    # Plain names only where no attention could claim them.
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
    """Convolutions alone (lfm2), RecurrentGemma's linear unit, MiniMax's lightning attention."""
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
