"""Tiny models with random weights in which recurrent and attention layers alternate, written with gguf.

`delta_net`: gated delta net and a mixture of experts (as Qwen3-Next). `mamba`: Mamba-2 layers (as Granite 4). `kda`:
Kimi delta attention and latent attention (as Kimi-Linear).
"""

from collections.abc import Callable
from pathlib import Path

from gguf import ExpertGatingFuncType, GGUFWriter

from support.odd_models import EMBED, HEADS, LAYERS, VOCAB, write_model

HEAD, KERNEL, EXPERTS, FF = 16, 4, 4, 32
RECURRENT = (0, 2)  # the other layers have attention
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def delta_net(path: Path) -> Path:
    """Qwen3-Next's shape."""
    k_heads, v_heads = 2, HEADS
    key, value = k_heads * HEAD, v_heads * HEAD

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        _rope_and_experts(file)
        file.add_expert_shared_feed_forward_length(FF)
        file.add_ssm_conv_kernel(KERNEL)
        file.add_ssm_inner_size(value)
        file.add_ssm_state_size(HEAD)
        file.add_ssm_time_step_rank(v_heads)
        file.add_ssm_group_count(k_heads)
        file.add_full_attention_interval(2)
        for layer in range(LAYERS):
            add(f"blk.{layer}.attn_norm.weight", EMBED)
            add(f"blk.{layer}.post_attention_norm.weight", EMBED)
            if layer in RECURRENT:
                add(f"blk.{layer}.attn_qkv.weight", 2 * key + value, EMBED)
                add(f"blk.{layer}.attn_gate.weight", value, EMBED)
                add(f"blk.{layer}.ssm_conv1d.weight", 2 * key + value, KERNEL)
                add(f"blk.{layer}.ssm_dt.bias", v_heads)
                add(f"blk.{layer}.ssm_a", v_heads)
                add(f"blk.{layer}.ssm_ba.weight", 2 * v_heads, EMBED)
                add(f"blk.{layer}.ssm_norm.weight", HEAD)
                add(f"blk.{layer}.ssm_out.weight", EMBED, value)
            else:
                add(f"blk.{layer}.attn_q.weight", 2 * HEADS * HEAD, EMBED)
                add(f"blk.{layer}.attn_k.weight", HEADS * HEAD, EMBED)
                add(f"blk.{layer}.attn_v.weight", HEADS * HEAD, EMBED)
                add(f"blk.{layer}.attn_output.weight", EMBED, HEADS * HEAD)
                add(f"blk.{layer}.attn_q_norm.weight", HEAD)
                add(f"blk.{layer}.attn_k_norm.weight", HEAD)
            _experts(add, layer)
            add(f"blk.{layer}.ffn_gate_inp_shexp.weight", EMBED)

    return write_model(path, "qwen3next", fill, template=_TEMPLATE)


def mamba(path: Path) -> Path:
    """Granite 4's shape, without experts."""
    inner, state, groups, heads = 2 * EMBED, 16, 1, HEADS
    conv = inner + 2 * groups * state

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        file.add_layer_norm_rms_eps(1e-5)
        file.add_ssm_conv_kernel(KERNEL)
        file.add_ssm_inner_size(inner)
        file.add_ssm_state_size(state)
        file.add_ssm_time_step_rank(heads)
        file.add_ssm_group_count(groups)
        file.add_rope_scaling_finetuned(False)
        for layer in range(LAYERS):
            add(f"blk.{layer}.attn_norm.weight", EMBED)
            if layer in RECURRENT:
                add(f"blk.{layer}.ssm_in.weight", 2 * inner + 2 * groups * state + heads, EMBED)
                add(f"blk.{layer}.ssm_conv1d.weight", conv, KERNEL)
                add(f"blk.{layer}.ssm_conv1d.bias", conv)
                add(f"blk.{layer}.ssm_dt.bias", heads)
                add(f"blk.{layer}.ssm_a", heads, 1)
                add(f"blk.{layer}.ssm_d", heads, 1)
                add(f"blk.{layer}.ssm_norm.weight", groups, inner // groups)
                add(f"blk.{layer}.ssm_out.weight", EMBED, inner)
            else:
                for name in ("q", "k", "v", "output"):
                    add(f"blk.{layer}.attn_{name}.weight", EMBED, EMBED)
            add(f"blk.{layer}.ffn_norm.weight", EMBED)
            for name in ("gate", "up"):
                add(f"blk.{layer}.ffn_{name}.weight", 2 * EMBED, EMBED)
            add(f"blk.{layer}.ffn_down.weight", EMBED, 2 * EMBED)

    return write_model(path, "granitehybrid", fill, kv_heads=_kv_heads(HEADS), template=_TEMPLATE)


def kda(path: Path) -> Path:
    """Kimi-Linear's shape."""
    latent, rope, wide = 32, 32, HEADS * HEAD  # rows of the latent cache must be whole blocks of Q8_0

    def fill(file: GGUFWriter, add: Callable[..., None]) -> None:
        _rope_and_experts(file)
        file.add_rope_dimension_count(rope)
        file.add_expert_shared_count(1)
        file.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        file.add_ssm_conv_kernel(KERNEL)
        file.add_kda_head_dim(HEAD)
        file.add_kv_lora_rank(latent)
        file.add_key_length(latent + rope)
        file.add_value_length(latent)
        file.add_key_length_mla(HEAD + rope)
        file.add_value_length_mla(HEAD)
        for layer in range(LAYERS):
            add(f"blk.{layer}.attn_norm.weight", EMBED)
            if layer in RECURRENT:
                for name in ("q", "k", "v"):
                    add(f"blk.{layer}.ssm_conv1d_{name}.weight", 1, wide, 1, KERNEL)
                    add(f"blk.{layer}.attn_{name}.weight", wide, EMBED)
                for name in ("f", "g"):
                    add(f"blk.{layer}.ssm_{name}_a.weight", HEAD, EMBED)
                    add(f"blk.{layer}.ssm_{name}_b.weight", wide, HEAD)
                add(f"blk.{layer}.ssm_beta.weight", HEADS, EMBED)
                add(f"blk.{layer}.ssm_a", HEADS, 1)
                add(f"blk.{layer}.ssm_dt.bias", wide)
                add(f"blk.{layer}.ssm_norm.weight", HEAD)
            else:
                add(f"blk.{layer}.attn_q.weight", HEADS * (HEAD + rope), EMBED)
                add(f"blk.{layer}.attn_kv_a_mqa.weight", latent + rope, EMBED)
                add(f"blk.{layer}.attn_kv_a_norm.weight", latent)
                add(f"blk.{layer}.attn_k_b.weight", HEADS, latent, HEAD)
                add(f"blk.{layer}.attn_v_b.weight", HEADS, HEAD, latent)
            add(f"blk.{layer}.attn_output.weight", EMBED, wide)
            add(f"blk.{layer}.ffn_norm.weight", EMBED)
            add(f"blk.{layer}.exp_probs_b.bias", EXPERTS)
            _experts(add, layer)
        add("output.weight", VOCAB, EMBED)

    return write_model(path, "kimi-linear", fill, kv_heads=_kv_heads(1), template=_TEMPLATE)


def _kv_heads(count: int) -> list[int]:
    return [0 if layer in RECURRENT else count for layer in range(LAYERS)]


def _rope_and_experts(file: GGUFWriter) -> None:
    file.add_layer_norm_rms_eps(1e-5)
    file.add_expert_count(EXPERTS)
    file.add_expert_used_count(2)
    file.add_expert_feed_forward_length(FF)


def _experts(add: Callable[..., None], layer: int) -> None:
    add(f"blk.{layer}.ffn_gate_inp.weight", EXPERTS, EMBED)
    for name, shape in (("gate", (FF, EMBED)), ("up", (FF, EMBED)), ("down", (EMBED, FF))):
        add(f"blk.{layer}.ffn_{name}_exps.weight", EXPERTS, *shape)
        add(f"blk.{layer}.ffn_{name}_shexp.weight", *shape)
