"""Reads config.json and the small JSON files beside a checkpoint: what the language model says of itself.

Values of the wrong kind count as absent; whoever needs one says so in the profile's guesses. Multimodal
configs keep the language model in a part of their own, which wins over what stands around it.
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
    """Read one JSON object; what is wrong with the file is said with its name."""
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


class Settings:
    """Typed look-ups in one configuration; a value of the wrong kind is as good as none."""

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

    def part(self, key: str) -> "Settings":
        """A nested table; empty where there is none."""
        value = self.values.get(key)
        return Settings(value if isinstance(value, Mapping) else {})


def language_model(config: Mapping[str, Any]) -> Settings:
    """The language model's settings: its own part laid over what surrounds it."""
    merged = dict(config)
    inner = config
    for _ in _PARTS:
        found = next((inner[key] for key in _PARTS if isinstance(inner.get(key), Mapping)), None)
        if found is None:
            break
        merged.update(found)
        inner = found
    return Settings(merged)


def declared_layers(settings: Settings) -> int | None:
    """Layers that decode, as the config counts them."""
    return settings.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def declared_experts(settings: Settings) -> tuple[int | None, int | None, int | None]:
    """How many experts there are, how many answer one token, and how many always do."""
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


def declared_context(settings: Settings) -> int | None:
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


def declared_heads(settings: Settings) -> tuple[int | None, int | None]:
    """Query heads, and key-value heads where the config names them."""
    inner = settings.part("attn_config")
    heads = settings.count("num_attention_heads", "n_head", "n_heads", "num_heads") or inner.count("n_heads")
    if settings.flag("multi_query") and not settings.flag("new_decoder_architecture"):
        return heads, 1  # falcon and gpt_bigcode; falcon's num_kv_heads is meaningless then
    kv_heads = settings.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return heads, kv_heads or inner.count("kv_n_heads")


def tokenizer_in(folder: Path, settings: Settings) -> Tokenizer:
    """What the folder carries to turn text into tokens and messages into text."""
    model = next((name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    template = (folder / "chat_template.jinja").is_file()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not template and (folder / name).is_file():
            template = bool(read_object(folder / name).get("chat_template"))
    return Tokenizer(model=model, tokens=settings.count("vocab_size", "padded_vocab_size"), chat_template=template)
