"""Generates small models with random weights that llama.cpp runs, for tests and benchmarks.

There are three kinds: mixture of experts with latent attention (like DeepSeek and Kimi), mixture of experts with
ordinary attention (like Qwen3-MoE), and dense (like Llama). They tokenize any text, generate nonsense words, and are
byte-identical for the same seed.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.model import quant_mix
from tokenmill.model.gguf import TensorEntry
from tokenmill.model.gguf_write import Encoded, Plain, TensorRow, encode, padded
from tokenmill.model.synthetic import vocabulary, weights
from tokenmill.model.tensor_table.parts import Extras
from tokenmill.model.tensor_table.slots import slots as slots_of
from tokenmill.storage.atomic import new_file
from tokenmill.units import format_bytes

SyntheticKind = Literal["moe-mla", "moe", "dense"]
SYNTHETIC_KEY = "tokenmill.synthetic"
_SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FILE_TYPES = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "Q3_K": "Q3_K_S", "MXFP4": "MXFP4_MOE"}
_LITE_LAYERS = (26, 27)
_DEFAULTS_HINT = "tokenmill models synth --help shows valid defaults"
# limits of llama.cpp; for other sizes, a limit against typing mistakes that would fill the memory
_MAX = {"layers": 512, "experts": 1024, "vocab": 1 << 20, "context": (1 << 31) - 1}
_MAX_OTHER = 1 << 17


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a synthetic model; None if its kind does not have the dimension."""

    layers: int = 4
    embed: int = 512
    heads: int = 8
    head_dim: int = 64
    kv_heads: int | None = None
    experts: int | None = None
    used: int | None = None
    expert_ff: int | None = None
    dense_ff: int | None = None
    vocab: int = 2048
    context: int = 4096


DEFAULTS: dict[SyntheticKind, Sizes] = {
    "moe-mla": Sizes(head_dim=128, experts=16, used=4, expert_ff=256, dense_ff=1024),
    "moe": Sizes(kv_heads=2, experts=16, used=4, expert_ff=256),
    "dense": Sizes(kv_heads=2, dense_ff=1536),
}


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """The written file."""

    path: str
    kind: SyntheticKind
    architecture: str
    sizes: Sizes
    type: str
    seed: int
    tensors: int
    parameters: int
    bytes: int


def sizes(kind: SyntheticKind, asked: dict[str, int | None]) -> Sizes:
    """The kind's defaults overridden by `asked`. Raises `UsageError` for impossible sizes."""
    default = DEFAULTS[kind]
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if getattr(default, name) is None:
            known = ", ".join(f"--{f.name.replace('_', '-')}" for f in fields(Sizes) if getattr(default, f.name))
            raise UsageError(f"--{name.replace('_', '-')} does not apply to {kind} models", hint=f"use {known}")
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1 (got {value})", hint=_DEFAULTS_HINT)
        if value > (maximum := _MAX.get(name, _MAX_OTHER)):
            raise UsageError(f"--{name.replace('_', '-')} must be at most {maximum} (got {value})", hint=_DEFAULTS_HINT)
    chosen = replace(default, **given)
    _check(kind, chosen)
    return chosen


def write(
    kind: SyntheticKind,
    chosen: Sizes,
    target: Path,
    *,
    type: str = "Q4_0",
    seed: int = 0,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> GeneratedModel:
    """Write the model, one tensor after another; `progress` receives (bytes written, total bytes).

    Raises `UsageError` for wrong arguments and an existing file without `force`.
    """
    if type not in weights.TYPES:
        raise UsageError(f"cannot generate {type} weights", hint=f"use one of {', '.join(weights.TYPES)}")
    if seed < 0:
        raise UsageError(f"--seed must be at least 0 (got {seed})")
    head = _head(kind, chosen, type, seed)
    total = head.header.file_bytes
    with new_file(target, force=force) as file:
        free = shutil.disk_usage(target.parent).free
        if total > free:
            message = f"{target.parent} has {format_bytes(free)} free, but the model needs {format_bytes(total)}"
            raise TokenmillError(message, hint="free disk space, choose another folder, or use smaller sizes")
        file.write(head.raw)
        done = len(head.raw)
        for tensor in head.header.tensors:
            for piece in _values(tensor, seed):
                file.write(piece.data)
                done += len(piece)
                if progress:
                    progress(done, total)
            gap = padded(tensor.bytes) - tensor.bytes
            file.write(b"\0" * gap)
            done += gap
    return GeneratedModel(
        path=str(target),
        kind=kind,
        architecture=head.header.text("general.architecture") or "",
        sizes=chosen,
        type=type,
        seed=seed,
        tensors=len(head.header.tensors),
        parameters=sum(tensor.elements for tensor in head.header.tensors),
        bytes=total,
    )


def _check(kind: SyntheticKind, chosen: Sizes) -> None:
    min_vocab = vocabulary.min_size(_SPECIAL)
    problems = [
        (chosen.used is not None and chosen.used > (chosen.experts or 0), "--used must be at most --experts"),
        (bool(chosen.kv_heads and chosen.heads % chosen.kv_heads), "--heads must be a multiple of --kv-heads"),
        (chosen.head_dim % 4 != 0, "--head-dim must be a multiple of 4"),
        (chosen.embed % 32 != 0, "--embed must be a multiple of 32"),
        (chosen.vocab < min_vocab, f"--vocab must be at least {min_vocab}, for all bytes and special tokens"),
        (kind == "moe-mla" and chosen.layers < 2, "--layers must be at least 2, because the first layer is dense"),
        (
            kind == "moe-mla" and chosen.layers in _LITE_LAYERS,
            f"--layers must not be {chosen.layers}, by which llama.cpp recognizes DeepSeek-V2-Lite",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise UsageError(message, hint=_DEFAULTS_HINT)


def _head(kind: SyntheticKind, chosen: Sizes, type: str, seed: int) -> Encoded:
    architecture, own, extras = _ARCHITECTURES[kind](chosen)
    keys: dict[str, Plain] = {f"{architecture}.{name}": value for name, value in own.items()}
    slots = slots_of(architecture, keys, chosen.vocab, extras)
    rows: list[TensorRow] = [
        (name, shape, quant_mix.fitting(type, shape[0]) if quant_mix.quantizable(name, shape) else "F32")
        for name, shape in slots
    ]
    words = vocabulary.build(chosen.vocab, _SPECIAL, speakable=True)
    general: dict[str, Plain] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"tokenmill {kind} {chosen.layers}x{chosen.embed} seed {seed}",
        "general.file_type": quant_mix.FILE_TYPES[_FILE_TYPES.get(type, type)][0],
        "general.quantization_version": 2,
        SYNTHETIC_KEY: True,
    }
    tokenizer: dict[str, Plain] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": words.types,
        "tokenizer.ggml.merges": words.merges,
        "tokenizer.ggml.bos_token_id": _SPECIAL["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": _SPECIAL["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": _SPECIAL["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }
    return encode({**general, **keys, **tokenizer}, rows, "synthetic")


def _values(tensor: TensorEntry, seed: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor: norms are one, biases zero, and matrices preserve the scale of their input."""
    if not tensor.name.endswith(".weight"):
        return iter([weights.constant(tensor.shape, 0.0)])
    if len(tensor.shape) == 1:
        return iter([weights.constant(tensor.shape, 1.0)])
    std = 1.0 if tensor.name == "token_embd.weight" else tensor.shape[0] ** -0.5
    return weights.pieces(tensor.name, tensor.type, tensor.shape, seed, std)


_Built = tuple[str, dict[str, Plain], Extras]  # architecture, keys, facts without a key


def _common(chosen: Sizes, feed_forward: int) -> dict[str, Plain]:
    return {
        "block_count": chosen.layers,
        "context_length": chosen.context,
        "embedding_length": chosen.embed,
        "feed_forward_length": feed_forward,
        "vocab_size": chosen.vocab,
        "attention.head_count": chosen.heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }


def _ordinary(chosen: Sizes) -> dict[str, Plain]:
    return {
        "attention.head_count_kv": chosen.kv_heads or chosen.heads,
        "attention.key_length": chosen.head_dim,
        "attention.value_length": chosen.head_dim,
        "rope.dimension_count": chosen.head_dim,
    }


def _routed(chosen: Sizes) -> dict[str, Plain]:
    return {
        "expert_count": chosen.experts or 0,
        "expert_used_count": chosen.used or 0,
        "expert_feed_forward_length": chosen.expert_ff or 0,
    }


def _latent(chosen: Sizes) -> _Built:
    """DeepSeek-V3's proportions: the latent is as wide as four attention heads, the rotated part as half a head."""
    head = chosen.head_dim
    rope = chosen.head_dim // 2
    latent = 4 * chosen.head_dim
    keys: dict[str, Plain] = {
        **_common(chosen, chosen.dense_ff or 0),
        **_routed(chosen),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": min(12 * head, chosen.embed),
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": head + rope,
        "attention.value_length_mla": head,
        "rope.dimension_count": rope,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return "deepseek2", keys, Extras(router_bias=True)


def _mixture(chosen: Sizes) -> _Built:
    feed_forward = (chosen.expert_ff or 0) * (chosen.used or 0)
    keys = {**_common(chosen, feed_forward), **_ordinary(chosen), **_routed(chosen)}
    return "qwen3moe", keys, Extras(head_norms=True)


def _dense(chosen: Sizes) -> _Built:
    return "llama", {**_common(chosen, chosen.dense_ff or 0), **_ordinary(chosen)}, Extras()


_ARCHITECTURES: dict[SyntheticKind, Callable[[Sizes], _Built]] = {"moe-mla": _latent, "moe": _mixture, "dense": _dense}
