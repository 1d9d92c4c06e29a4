"""Families with recurrent layers between those that attend."""

from tokenmill.model.conversion.fields import Converted, ModelConfig, common, latent, weighted
from tokenmill.model.gguf_write import Plain
from tokenmill.model.tensor_table.parts import Extras

_MROPE_SECTIONS = [11, 11, 10, 0]


def _delta_net(config: ModelConfig, prediction_layers: int) -> dict[str, Plain]:
    values = config.count("linear_num_value_heads")
    return common(config, prediction_layers=prediction_layers) | {
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.count("shared_expert_intermediate_size"),
        "ssm.conv_kernel": config.count("linear_conv_kernel_dim"),
        "ssm.state_size": config.count("linear_key_head_dim"),
        "ssm.group_count": config.count("linear_num_key_heads"),
        "ssm.time_step_rank": values,
        "ssm.inner_size": config.count("linear_value_head_dim") * values,
        "full_attention_interval": config.maybe("full_attention_interval") or 4,
        "rope.dimension_count": config.rotated(0.25),
    }


def qwen3next(config: ModelConfig) -> Converted:
    """Qwen3-Next, whose checkpoint has one prediction layer that its config does not mention."""
    keys = _delta_net(config, config.prediction_layers() or 1)
    return Converted("qwen3next", keys, Extras(tied_output=config.flag("tie_word_embeddings")))


def qwen35moe(config: ModelConfig) -> Converted:
    """Qwen3.5's and Qwen3.6's mixtures of experts."""
    sections = config.rope.values.get("mrope_section")
    keys = _delta_net(config, config.prediction_layers())
    listed = [*sections, 0, 0, 0, 0][:4] if isinstance(sections, list) else _MROPE_SECTIONS
    keys["rope.dimension_sections"] = listed
    return Converted("qwen35moe", keys, Extras(tied_output=config.flag("tie_word_embeddings")))


def kimi_k3(config: ModelConfig) -> Converted:
    """Kimi-K3: Kimi delta attention, latent attention, and experts in a narrower space."""
    linear = config.part("linear_attn_config")
    full = set(linear.numbers("full_attn_layers"))  # counted from 1
    layers = config.count("num_hidden_layers")
    keys = common(config) | latent(config)
    keys |= {
        "attention.head_count_kv": [int(layer + 1 in full) for layer in range(layers)],
        "ssm.conv_kernel": linear.count("short_conv_kernel_size"),
        "kda.head_dim": linear.count("head_dim"),
        "kda.gate_lower_bound": linear.number("gate_lower_bound"),
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_count": config.count("num_shared_experts"),
        "leading_dense_block_count": config.count("first_k_dense_replace"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_weights_norm": config.flag("moe_renormalize"),
        "activation.situ_beta": config.number("activation_situ_beta"),
        "activation.situ_linear_beta": config.number("activation_situ_linear_beta"),
        "attn_res.block_size": config.count("attn_res_block_size"),
    }
    if (width := config.maybe("routed_expert_hidden_size")) is not None:
        keys["expert_latent_length"] = width
    return Converted("kimi-k3", keys, Extras(router_bias=True))


def ling3(config: ModelConfig) -> Converted:
    """Ling 3: Kimi delta attention in all layers of a group but the last, which has latent attention."""
    prediction = config.prediction_layers()
    layers = config.count("num_hidden_layers")
    group = config.count("layer_group_size")
    keys = common(config, prediction_layers=prediction) | latent(config) | weighted(config)
    keys.pop("attention.value_length")  # the conversion does not write it
    keys |= {
        "attention.head_count_kv": [
            int((layer + 1) % group == 0 or layer >= layers // group * group) for layer in range(layers + prediction)
        ],
        "ssm.conv_kernel": config.count("short_conv_kernel_size"),
        "kda.head_dim": config.count("head_dim"),
        "kda.safe_gate": config.flag("kda_safe_gate"),
        "kda.gate_lower_bound": config.number("kda_lower_bound"),
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.count("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.count("num_shared_experts"),
        "leading_dense_block_count": config.count("first_k_dense_replace"),
        "expert_gating_func": 2,
    }
    return Converted("bailingmoe3", keys, Extras(router_bias=True))


def nemotron_h(config: ModelConfig) -> Converted:
    """Nemotron-H's mixtures of experts: each layer is Mamba 2, attention or experts."""
    kinds = config.words("layers_block_type") or [
        {"M": "mamba", "*": "attention", "E": "moe"}.get(letter, letter)
        for letter in config.word("hybrid_override_pattern") or ""
    ]
    if not kinds or not set(kinds) <= {"mamba", "attention", "moe"}:
        raise config.lacks("hybrid_override_pattern")
    prediction = config.prediction_layers()
    epsilon = config.number("layer_norm_epsilon", config.values.get("norm_eps"))
    values = {**config.values, "num_hidden_layers": len(kinds), "rms_norm_eps": config.values.get("norm_eps", epsilon)}
    keys = common(ModelConfig(values, config.source), prediction_layers=prediction) | weighted(config)
    kinds = [*kinds, *["both"] * prediction]  # a prediction layer has attention and experts
    expert = config.count("moe_intermediate_size")
    heads = config.count("num_key_value_heads")
    keys |= {
        "context_length": 1 << 20,  # llama.cpp's value, because the model has no position encoding
        "attention.layer_norm_epsilon": epsilon,
        "attention.head_count_kv": [heads if kind in ("attention", "both") else 0 for kind in kinds],
        "feed_forward_length": [expert if kind in ("moe", "both") else 0 for kind in kinds],
        "expert_feed_forward_length": expert,
        "expert_shared_feed_forward_length": config.count("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.count("n_shared_experts"),
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.count("conv_kernel"),
        "ssm.state_size": config.count("ssm_state_size"),
        "ssm.group_count": config.count("n_groups"),
        "ssm.inner_size": config.count("mamba_num_heads") * config.count("mamba_head_dim"),
        "ssm.time_step_rank": config.count("mamba_num_heads"),
    }
    keys.pop("expert_group_used_count", None)
    if (width := config.maybe("moe_latent_size")) is not None:
        keys["moe_latent_size"] = width
    extras = Extras(conv_bias=config.flag("use_conv_bias"), router_bias=True)
    return Converted("nemotron_h_moe", keys, extras)
