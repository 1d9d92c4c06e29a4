"""Fields of a config.json, and the GGUF keys that every family has in common."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import ModelError
from tokenmill.model.gguf_write import Plain
from tokenmill.model.tensor_table.parts import Extras

_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}  # llama.cpp's llama_expert_gating_func_type
_CONTEXT = ("max_position_embeddings", "n_ctx", "n_positions", "max_sequence_length", "model_max_length")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_SCORING = ("score_function", "scoring_func", "score_func", "moe_router_activation_func")


@dataclass(frozen=True, slots=True)
class Converted:
    """A config as llama.cpp sees the converted model."""

    architecture: str
    keys: dict[str, Plain]  # without the architecture's prefix
    extras: Extras = field(default_factory=Extras)


class ModelConfig:
    """A config of one language model; a missing or malformed field is a `ModelError` with its name."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def count(self, *names: str) -> int:
        """The first of these fields that is a number of things."""
        found = self.maybe(*names)
        if found is None:
            raise self.lacks(names[0])
        return found

    def maybe(self, *names: str) -> int | None:
        """The first of these fields that is a number of things, or None."""
        for name in names:
            value = self.values.get(name)
            if type(value) is int and 0 <= value < 1 << 40:
                return value
            if isinstance(value, list) and value and len(set(map(repr, value))) == 1 and type(value[0]) is int:
                return int(value[0])  # one value per layer, all equal (Hunyuan)
        return None

    def number(self, name: str, default: float | None = None) -> float:
        """A number with a fraction."""
        value = self.values.get(name, default)
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise self.lacks(name)
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    def word(self, *names: str) -> str | None:
        """The first of these fields that is a text."""
        return next((value for name in names if isinstance(value := self.values.get(name), str)), None)

    def numbers(self, name: str) -> list[int]:
        """A list of integers."""
        value = self.values.get(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.lacks(name)
        return value

    def words(self, name: str) -> list[str] | None:
        """A list of texts, or None."""
        value = self.values.get(name)
        return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None

    def part(self, name: str) -> "ModelConfig":
        """A nested table; empty if it is missing."""
        value = self.values.get(name)
        return ModelConfig(value if isinstance(value, Mapping) else {}, f"{name} in {self.source}")

    def lacks(self, name: str) -> ModelError:
        """The error for a field that is missing or has another type."""
        near = difflib.get_close_matches(name, set(self.values) - {name}, n=1, cutoff=0.8)
        nearest = f"is {near[0]} meant to be {name}? " if near else ""
        return ModelError(
            f"{self.source} has no usable {name}",
            hint=f"{nearest}check that it is the config.json of a language model, or give a GGUF of the model",
        )

    @property
    def rope(self) -> "ModelConfig":
        """The parameters of the position encoding, which newer configs nest."""
        return self.part(
            "rope_parameters" if isinstance(self.values.get("rope_parameters"), Mapping) else "rope_scaling"
        )

    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.maybe("head_dim") or self.count("hidden_size") // self.count("num_attention_heads")

    def rotated(self, default: float) -> int:
        """Dimensions of a head that the position encoding rotates."""
        share = self.rope.values.get("partial_rotary_factor", self.values.get("partial_rotary_factor", default))
        return int(self.head_dim() * float(share))

    def prediction_layers(self) -> int:
        """Number of layers for multi-token prediction."""
        return self.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0


def common(config: ModelConfig, *, prediction_layers: int = 0) -> dict[str, Plain]:
    """The keys that llama.cpp writes for every family; `prediction_layers` are in the file, too."""
    keys: dict[str, Plain] = {
        "block_count": config.count("num_hidden_layers", "n_layers") + prediction_layers,
        "context_length": config.count(*_CONTEXT),
        "embedding_length": config.count("hidden_size"),
        "attention.head_count": config.count("num_attention_heads"),
        "attention.head_count_kv": config.count("num_key_value_heads", "num_attention_heads"),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", config.values.get("norm_eps")),
        "vocab_size": config.count("vocab_size"),
        **_rope(config),
    }
    if (hidden := config.maybe("dense_intermediate_size", "intermediate_size")) is not None:
        keys["feed_forward_length"] = hidden
    if (head := config.maybe("head_dim")) is not None:
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if prediction_layers:
        keys["nextn_predict_layers"] = prediction_layers
    return keys | _routing(config)


def _routing(config: ModelConfig) -> dict[str, Plain]:
    keys: dict[str, Plain] = {}
    for name, fields in (("expert_count", _EXPERTS), ("expert_used_count", _EXPERTS_USED)):
        if (found := config.maybe(*fields)) is not None:
            keys[name] = found
    for name, single in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        if (found := config.maybe(single)) is not None:
            keys[name] = found
    if (scoring := config.word(*_SCORING)) in _GATING:
        keys["expert_gating_func"] = _GATING[scoring]
    return keys


def _rope(config: ModelConfig) -> dict[str, Plain]:
    rope = config.rope
    keys: dict[str, Plain] = {}
    base = rope.values.get("rope_theta", config.values.get("rope_theta"))
    if base is not None:
        keys["rope.freq_base"] = float(base)
    if rope.word("rope_type", "type") == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.number("factor"),
            "rope.scaling.original_context_length": rope.count("original_max_position_embeddings"),
        }
        for name in ("beta_fast", "beta_slow"):
            if name in rope.values:
                keys[f"rope.scaling.yarn_{name}"] = rope.number(name)
    return keys


def weighted(config: ModelConfig) -> dict[str, Plain]:
    """Scale and normalization of the routed experts' weights."""
    return {
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_weights_norm": config.flag("norm_topk_prob"),
    }


def latent(config: ModelConfig) -> dict[str, Plain]:
    """Multi-head latent attention, which llama.cpp serves as one wide KV head."""
    rank = config.count("kv_lora_rank")
    rotated = config.count("qk_rope_head_dim")
    keys: dict[str, Plain] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.count("qk_nope_head_dim") + rotated,
        "attention.value_length_mla": config.count("v_head_dim"),
        "rope.dimension_count": rotated,
    }
    if (q_rank := config.maybe("q_lora_rank")) is not None:
        keys["attention.q_lora_rank"] = q_rank
    return keys
