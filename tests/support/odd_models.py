"""Tiny models with random weights and unusual attention or state, written with gguf.

`windowed`: three of four layers see only the last tokens (as Cohere2). `chunked`: three of four layers see only their
chunk of 8192 tokens (as Llama 4). `recurrent`: no attention, a running state (Mamba).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from tokenmill.model.synthetic import vocabulary

SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|sep|>": 3}
VOCAB, EMBED, HEADS, LAYERS = 512, 64, 4, 4


def windowed(path: Path, *, window: int = 32, template: str | None = None) -> Path:
    """Cohere2's shape with a window of our own."""

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        file.add_sliding_window(window)
        file.add_logit_scale(1.0)
        file.add_layer_norm_eps(1e-5)
        for layer in range(LAYERS):
            _attention(add, layer)
            _feed_forward(add, layer)

    return write_model(path, "cohere2", fill, template=template)


def chunked(path: Path) -> Path:
    """Llama 4's shape: its chunk size is fixed in llama.cpp, so this model has a single head to be fast."""
    experts, ff = 16, 32

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        file.add_layer_norm_rms_eps(1e-5)
        file.add_expert_count(experts)
        file.add_expert_used_count(1)
        file.add_expert_feed_forward_length(ff)
        file.add_interleave_moe_layer_step(1)
        for layer in range(LAYERS):
            _attention(add, layer)
            add(f"blk.{layer}.ffn_norm.weight", EMBED)
            add(f"blk.{layer}.ffn_gate_inp.weight", experts, EMBED)
            for name, shape in (("gate", (ff, EMBED)), ("up", (ff, EMBED)), ("down", (EMBED, ff))):
                add(f"blk.{layer}.ffn_{name}_exps.weight", experts, *shape)
                add(f"blk.{layer}.ffn_{name}_shexp.weight", *shape)
        add("output.weight", VOCAB, EMBED)

    return write_model(path, "llama4", fill, heads=1)


def recurrent(path: Path) -> Path:
    """Mamba's shape."""
    inner, state, rank, kernel = 2 * EMBED, 16, 4, 4

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        file.add_layer_norm_rms_eps(1e-5)
        file.add_ssm_conv_kernel(kernel)
        file.add_ssm_inner_size(inner)
        file.add_ssm_state_size(state)
        file.add_ssm_time_step_rank(rank)
        for layer in range(LAYERS):
            add(f"blk.{layer}.attn_norm.weight", EMBED)
            add(f"blk.{layer}.ssm_in.weight", 2 * inner, EMBED)
            add(f"blk.{layer}.ssm_conv1d.weight", inner, kernel)
            add(f"blk.{layer}.ssm_conv1d.bias", inner)
            add(f"blk.{layer}.ssm_x.weight", rank + 2 * state, inner)
            add(f"blk.{layer}.ssm_dt.weight", inner, rank)
            add(f"blk.{layer}.ssm_dt.bias", inner)
            add(f"blk.{layer}.ssm_a", inner, state)
            add(f"blk.{layer}.ssm_d", inner)
            add(f"blk.{layer}.ssm_out.weight", EMBED, inner)

    return write_model(path, "mamba", fill)


def _attention(add: Callable[..., None], layer: int) -> None:
    add(f"blk.{layer}.attn_norm.weight", EMBED)
    for name in ("q", "k", "v", "output"):
        add(f"blk.{layer}.attn_{name}.weight", EMBED, EMBED)


def _feed_forward(add: Callable[..., None], layer: int) -> None:
    for name in ("gate", "up"):
        add(f"blk.{layer}.ffn_{name}.weight", 2 * EMBED, EMBED)
    add(f"blk.{layer}.ffn_down.weight", EMBED, 2 * EMBED)


def write_model(
    path: Path,
    architecture: str,
    fill: Callable[[GGUFWriter, Callable[..., None]], None],
    *,
    heads: int = HEADS,
    kv_heads: list[int] | None = None,
    template: str | None = None,
) -> Path:
    """Write a model with the vocabulary and the keys that all have; `fill` adds the others and the layers."""
    random = np.random.default_rng(0)
    embedding = random.normal(size=(VOCAB, EMBED))
    file = GGUFWriter(path, architecture)

    def add(name: str, *shape: int) -> None:
        if name.endswith("ssm_a"):
            value = -np.abs(random.normal(size=shape))
        elif len(shape) == 1:
            value = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
        else:
            # The output equals the embedding: the most likely token is then ahead by far more than rounding errors.
            is_embedding = name in ("token_embd.weight", "output.weight")
            value = embedding if is_embedding else random.normal(size=shape) * shape[-1] ** -0.5
        file.add_tensor(name, value.astype(np.float32))

    file.add_context_length(32768)
    file.add_embedding_length(EMBED)
    file.add_block_count(LAYERS)
    file.add_head_count(heads)
    file.add_head_count_kv(heads if kv_heads is None else kv_heads)
    file.add_feed_forward_length(2 * EMBED)
    file.add_vocab_size(VOCAB)
    words = vocabulary.build(VOCAB, SPECIAL, speakable=True)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(words.tokens)
    file.add_token_types(words.types)
    file.add_token_merges(words.merges)
    file.add_bos_token_id(SPECIAL["<|endoftext|>"])
    file.add_eos_token_id(SPECIAL["<|im_end|>"])
    if template is not None:
        file.add_chat_template(template)
    add("token_embd.weight", VOCAB, EMBED)
    add("output_norm.weight", EMBED)
    fill(file, add)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
