"""Finds the family of a config.json and converts it to GGUF keys."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.errors import UnknownModel
from tokenmill.model.conversion import attention, hybrid
from tokenmill.model.conversion.fields import Converted, ModelConfig
from tokenmill.model.huggingface.config import language_model

_FAMILIES: Mapping[str, Callable[[ModelConfig], Converted]] = {  # by `model_type` of the language model
    "deepseek_v2": attention.deepseek2,
    "deepseek_v3": attention.deepseek2,
    "kimi_k2": attention.deepseek2,
    "deepseek_v32": attention.sparse_deepseek,
    "glm_moe_dsa": attention.sparse_deepseek,
    "deepseek_v4": attention.deepseek4,
    "glm4_moe": attention.glm4moe,
    "qwen3": attention.qwen3,
    "qwen3_moe": attention.qwen3moe,
    "llama": attention.llama,
    "llama4_text": attention.llama4,
    "gpt_oss": attention.gpt_oss,
    "minimax_m2": attention.minimax_m2,
    "minimax_m3": attention.minimax_m3,
    "ernie4_5_moe": attention.ernie_moe,
    "hunyuan_v1_moe": attention.hunyuan_moe,
    "bailing_moe_v2": attention.ling2,
    "mistral_large_3": attention.mistral_large3,
    "qwen3_next": hybrid.qwen3next,
    "qwen3_5_moe_text": hybrid.qwen35moe,
    "kimi_linear": hybrid.kimi_k3,
    "bailing_hybrid": hybrid.ling3,
    "nemotron_h": hybrid.nemotron_h,
}
# `model_type` is missing or shared by different models; the class is not
_BY_CLASS: Mapping[str, str] = {
    "BailingMoeV2ForCausalLM": "bailing_moe_v2",
    "MistralLarge3ForCausalLM": "mistral_large_3",
}


def families() -> tuple[str, ...]:
    """The model types that can be converted, sorted."""
    return tuple(sorted(_FAMILIES))


def convert(config: Mapping[str, Any], source: str) -> Converted:
    """The GGUF keys of a config; `source` names it in errors.

    Raises `UnknownModel` for a family without rules and `ModelError` if a field is missing.
    """
    settings = ModelConfig(language_model(config).values, source)
    named = settings.word("model_type")
    classes = settings.words("architectures") or []
    kind = next((_BY_CLASS[name] for name in classes if name in _BY_CLASS), named)
    if kind == "kimi_linear" and "attn_res_block_size" not in settings.values:
        kind = "kimi_linear of Kimi-Linear"  # Kimi-K3's language model has the type of an older family
    family = _FAMILIES.get(kind or "")
    if family is None:
        near = difflib.get_close_matches(kind or "", _FAMILIES, n=1)
        nearest = f"the nearest known type is {near[0]}; " if near else ""
        raise UnknownModel(
            f"{source} has model type {kind or 'unknown'!r}, whose tensors cannot be derived",
            hint=f"{nearest}give a GGUF of the model, whose header is enough; known types: {', '.join(families())}",
        )
    return family(settings)
