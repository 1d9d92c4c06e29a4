"""Models of published runs by the names that the records use, with the stated quantization and size.

The base is a model of the catalogue, or a shape from the model's published config.json. The name of the quantization
gives the types of the tensors; the stated size of the file or bits per weight scales their bytes.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from support.run_models import drawn, model, retyped
from tokenmill.errors import TokenmillError
from tokenmill.model.profile import Experts, LayerCache, Profile, TensorClass
from tokenmill.model.read import read
from tokenmill.model.resize import resized
from tokenmill.model.tensor_types import BY_NAME
from tokenmill.units import GIB

_CATALOGUE = (  # (pattern of the record's model, name in the catalogue)
    (r"DeepSeek.*(R1|V3|671B|TNG|Chimera|Terminus)", "deepseek-v3"),
    (r"Kimi.?K2", "kimi-k2.5"),
    (r"GLM.?4\.[567].*(Air|106B|110B)", ""),
    (r"GLM.?4\.[567].*Flash", ""),
    (r"GLM.?4\.[567]", "glm-4.5"),
    (r"Qwen3.?235B", "qwen3-235b-a22b"),
    (r"Qwen3.?32B", "qwen3-32b"),
    (r"gpt.?oss.?120", "gpt-oss-120b"),
    (r"Llama.?4.*Maverick", "llama-4-maverick"),
    (r"Llama.?4.*Scout", "llama-4-scout"),
    (r"Llama.?3.*70B", "llama-3.3-70b"),
)


def _plain(heads: int, kv_heads: int, head: int, embed: int) -> dict[str, tuple[int, int]]:
    query, key = heads * head, kv_heads * head
    return {
        "attn_q": (embed, query),
        "attn_k": (embed, key),
        "attn_v": (embed, key),
        "attn_output": (query, embed),
    }


def _grouped(
    name: str,
    layers: int,
    embed: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    *,
    dense_ff: int = 0,
    experts: Experts | None = None,
    expert_ff: int = 0,
    shared_ff: int = 0,
    dense_layers: int = 0,
    window: tuple[int, int] | None = None,
) -> Profile:
    """A model with grouped-query attention: `heads` are query heads, key heads and their width; `window` a span and the
    number of layers of which one has none."""
    query, kv_heads, head = heads
    width = kv_heads * head
    full = LayerCache("full", width, width)
    narrow = LayerCache("window", width, width, span_tokens=window[0]) if window else full
    every = window[1] if window else 1
    return drawn(
        name,
        layers=layers,
        embed=embed,
        experts=experts or Experts(1, 1),
        expert_ff=expert_ff,
        attention=_plain(query, kv_heads, head, embed),
        vocabulary=vocabulary,
        heads=query,
        kv_heads=kv_heads,
        cache=tuple(full if index % every == every - 1 else narrow for index in range(layers)),
        expert_types=("Q4_K", "Q4_K"),
        rest_type="Q4_K",
        shared_ff=shared_ff,
        dense_layers=layers if experts is None else dense_layers,
        dense_ff=dense_ff,
    )


@cache
def _shape(text: str) -> Profile | None:
    """A model by the shape in its config.json, with 4-bit tensors; None: no such model."""
    found = next((make for pattern, make in _SHAPES if re.search(pattern, text, re.IGNORECASE)), None)
    return None if found is None else found()


_SHAPES: tuple[tuple[str, Callable[[], Profile]], ...] = (
    (
        r"Qwen3.?(Coder.?)?30B",
        lambda: _grouped("qwen3-30b", 48, 2048, (32, 4, 128), 151936, experts=Experts(128, 8), expert_ff=768),
    ),
    (
        r"Qwen3.?Coder.?480B",
        lambda: _grouped("qwen3-480b", 62, 6144, (96, 8, 128), 151936, experts=Experts(160, 8), expert_ff=2560),
    ),
    (r"Qwen3.*(Next|80B)", lambda: model("qwen3-coder-next/IQ4_NL")),
    (r"Qwen3\.5.*397B", lambda: model("qwen3.5-397b/IQ4_NL")),
    (r"GLM.?4\.7.?Flash", lambda: model("glm-4.7-flash/IQ5_K")),
    (r"GLM.?5", lambda: model("glm-5.1/IQ3_KS")),
    (
        r"GLM.?4\.[56].*(Air|106B|110B)",
        lambda: _grouped(
            "glm-4.5-air",
            46,
            4096,
            (96, 8, 128),
            151552,
            experts=Experts(128, 8, 1),
            expert_ff=1408,
            shared_ff=1408,
            dense_layers=1,
            dense_ff=10944,
        ),
    ),
    (r"MiniMax.?M2", lambda: model("minimax-m2.5/IQ5_K")),
    (
        r"gpt.?oss.?20",
        lambda: _grouped(
            "gpt-oss-20b", 24, 2880, (64, 8, 64), 201088, experts=Experts(32, 4), expert_ff=2880, window=(128, 2)
        ),
    ),
    (
        r"Mixtral.?8x7",
        lambda: _grouped("mixtral", 32, 4096, (32, 8, 128), 32000, experts=Experts(8, 2), expert_ff=14336),
    ),
    (
        r"Mixtral.?8x22",
        lambda: _grouped("mixtral-8x22b", 56, 6144, (48, 8, 128), 32768, experts=Experts(8, 2), expert_ff=16384),
    ),
    (
        r"DeepSeek.*V2.*Lite",
        lambda: drawn(
            "deepseek-v2-lite",
            layers=27,
            embed=2048,
            experts=Experts(64, 6, 2),
            expert_ff=1408,
            vocabulary=102400,
            heads=16,
            kv_heads=1,
            cache=(LayerCache("latent", 576, 512),) * 27,
            expert_types=("Q4_K", "Q4_K"),
            rest_type="Q4_K",
            shared_ff=2816,
            dense_layers=1,
            dense_ff=10944,
            attention={
                "attn_q": (2048, 3072),
                "attn_kv_a_mqa": (2048, 576),
                "attn_k_b": (128, 512 * 16),
                "attn_v_b": (512, 128 * 16),
                "attn_output": (2048, 2048),
            },
        ),
    ),
    (r"Llama.?3.*405B", lambda: _grouped("llama-405b", 126, 16384, (128, 8, 128), 128256, dense_ff=53248)),
    (r"Llama.?3.*8B", lambda: _grouped("llama-8b", 32, 4096, (32, 8, 128), 128256, dense_ff=14336)),
    (r"Llama.?3.*3B", lambda: _grouped("llama-3b", 28, 3072, (24, 8, 128), 128256, dense_ff=8192)),
    (r"Llama.?2.*7B", lambda: _grouped("llama-2-7b", 32, 4096, (32, 32, 128), 32000, dense_ff=11008)),
    (r"Llama.?2.*13B", lambda: _grouped("llama-2-13b", 40, 5120, (40, 40, 128), 32000, dense_ff=13824)),
    (r"Llama.?2.*70B", lambda: _grouped("llama-2-70b", 80, 8192, (64, 8, 128), 32000, dense_ff=28672)),
    (r"Qwen2\.?5?.*72B", lambda: _grouped("qwen-72b", 80, 8192, (64, 8, 128), 152064, dense_ff=29568)),
    (r"Qwen2\.?5?.*32B|QwQ", lambda: _grouped("qwen-32b", 64, 5120, (40, 8, 128), 152064, dense_ff=27648)),
    (r"Qwen2\.?5?.*14B", lambda: _grouped("qwen-14b", 48, 5120, (40, 8, 128), 152064, dense_ff=13824)),
    (r"Qwen2\.?5?.*7B", lambda: _grouped("qwen-7b", 28, 3584, (28, 4, 128), 152064, dense_ff=18944)),
    (r"Qwen3.?14B", lambda: _grouped("qwen3-14b", 40, 5120, (40, 8, 128), 151936, dense_ff=17408)),
    (r"Qwen3.?8B", lambda: _grouped("qwen3-8b", 36, 4096, (32, 8, 128), 151936, dense_ff=12288)),
    (r"Qwen3.?4B", lambda: _grouped("qwen3-4b", 36, 2560, (32, 8, 128), 151936, dense_ff=9728)),
    (r"Mistral.*(Large|123B)", lambda: _grouped("mistral-large", 88, 12288, (96, 8, 128), 32768, dense_ff=28672)),
    (
        r"Mistral.*(Small|24B)|Devstral|Magistral",
        lambda: _grouped("mistral-24b", 40, 5120, (32, 8, 128), 131072, dense_ff=32768),
    ),
    (r"Mistral.*7B", lambda: _grouped("mistral-7b", 32, 4096, (32, 8, 128), 32768, dense_ff=14336)),
    (r"Phi.?4", lambda: _grouped("phi-4", 40, 5120, (40, 10, 128), 100352, dense_ff=17920)),
    (
        r"Gemma.?3.*27B",
        lambda: _grouped("gemma-27b", 62, 5376, (32, 16, 128), 262144, dense_ff=21504, window=(1024, 6)),
    ),
    (r"SmolLM3", lambda: _grouped("smollm3", 36, 2048, (16, 4, 128), 128256, dense_ff=11008)),
)

_KIND = re.compile(
    r"(MXFP4|NVFP4|BF16|F16|TQ[12]_0|Q8_KV|IQ\d_(?:KSS|KS|KT|KL|K|XXS|XS|S|M|NL)|Q\d_(?:K|[01]))((?:_R\d+)|(?:_[SMLX]+))?"
)
_NAMED_MIXES = {
    r"ubergarm IQ2_KL": "IQ2_KL",
    r"ubergarm IQ2_K_R4": "IQ2_K_R4",
    r"ubergarm IQ3_K_R4": "IQ3_K_R4",
    r"ubergarm Q2_K_R4": "Q2_K_R4",
    r"ubergarm IQ5_K": "IQ5_K",
}


def model_of(run: Mapping[str, Any]) -> Profile | None:
    """The model of a record; None if its shape or its quantization is not known."""
    text = str(run["model"])
    quant = run["quant"]
    name = str(quant["name"] or "")
    try:
        profile = _typed(text, name)
    except TokenmillError:
        return None
    if profile is None:
        return None
    size = quant["file_size_gib"] and quant["file_size_gib"] * GIB
    bits = quant["bpw"] and quant["bpw"] * profile.parameters / 8
    wanted = size or bits
    return resized(profile, round(wanted)) if wanted else profile


@cache
def _typed(text: str, quant: str) -> Profile | None:
    mix = next((mix for pattern, mix in _NAMED_MIXES.items() if re.search(pattern, quant)), None)
    base = next((name for pattern, name in _CATALOGUE if re.search(pattern, text, re.IGNORECASE)), "")
    kind = _KIND.search(quant.upper().replace("-", "_"))
    if base and mix:
        return model(f"{base}:Q8_0/{mix}")
    if kind is None:
        kind = _KIND.search("Q4_K_M")  # a size alone
        assert kind is not None
    if base:
        return _from_catalogue(base, kind, "ubergarm" in quant or "anikifoss" in quant)
    profile = _shape(text)
    if profile is None:
        return None
    expert = _type_of(kind)
    routed = any(tensor.cls is TensorClass.ROUTED_EXPERTS for tensor in profile.tensors)
    rest = "Q8_0" if routed and ("ubergarm" in quant or expert.startswith("MXFP4")) else expert
    return retyped(profile, {"_exps": expert, r"output\.weight": "Q6_K" if "Q4" in rest else rest, ".": rest})


def _type_of(kind: re.Match[str]) -> str:
    """The type of most tensors of a quantization such as Q4_K_M, IQ3_XXS or Q4_K_R4."""
    both = kind[1] + (kind[2] or "")
    name = {"IQ2_M": "IQ2_S", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}.get(kind[1], kind[1])
    return both if both in BY_NAME else name


def _from_catalogue(base: str, kind: re.Match[str], rest_8_bits: bool) -> Profile:
    both = kind[1] + (kind[2] or "")
    if not rest_8_bits:
        for mix in (both, f"{kind[1]}_M", kind[1], f"{kind[1]}_MOE"):
            try:
                return read(f"{base}:{mix}")
            except TokenmillError:
                continue
    expert = _type_of(kind)
    return retyped(read(f"{base}:Q8_0"), {"_exps": expert})
