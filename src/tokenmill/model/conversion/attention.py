"""Families whose layers all attend to the context."""

from dataclasses import replace

from tokenmill.model.conversion.fields import Converted, ModelConfig, common, latent, weighted
from tokenmill.model.gguf_write import Plain
from tokenmill.model.tensor_table.parts import Extras

_HUNYUAN_CONTEXT = 256 * 1024  # llama.cpp's value for the dynamic scaling, whose config has 32 k


def _shared_experts(config: ModelConfig) -> dict[str, Plain]:
    return {
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_count": config.maybe("n_shared_experts", "num_shared_experts") or 0,
        "leading_dense_block_count": config.maybe("first_k_dense_replace") or 0,
    }


def _deepseek(config: ModelConfig, prediction_layers: int) -> dict[str, Plain]:
    keys = common(config, prediction_layers=prediction_layers) | latent(config) | _shared_experts(config)
    keys |= weighted(config)
    if "mscale_all_dim" in config.rope.values:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope.number("mscale_all_dim")
    return keys


def _biased(config: ModelConfig) -> Extras:
    return Extras(router_bias=config.word("topk_method") != "greedy", tied_output=config.flag("tie_word_embeddings"))


def deepseek2(config: ModelConfig) -> Converted:
    """DeepSeek-V2 to V3.1, R1, Kimi-K2 to K2.6; the conversion leaves the prediction layer out."""
    return Converted("deepseek2", _deepseek(config, 0), _biased(config))


def mistral_large3(config: ModelConfig) -> Converted:
    """Mistral Large 3 as DeepSeek-V3's architecture; its router has softmax scores and no bias."""
    keys = _deepseek(config, 0) | {"expert_gating_func": 1, "expert_weights_norm": True}
    return Converted("deepseek2", keys, Extras(tied_output=config.flag("tie_word_embeddings")))


def sparse_deepseek(config: ModelConfig) -> Converted:
    """DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer selects."""
    keys = _deepseek(config, config.prediction_layers()) | {
        "attention.indexer.head_count": config.count("index_n_heads"),
        "attention.indexer.key_length": config.count("index_head_dim"),
        "attention.indexer.top_k": config.count("index_topk"),
    }
    if types := config.words("indexer_types"):
        keys["attention.indexer.types"] = [kind == "full" for kind in types]
    architecture = "glm-dsa" if config.word("model_type") == "glm_moe_dsa" else "deepseek32"
    return Converted(architecture, keys, _biased(config))


def deepseek4(config: ModelConfig) -> Converted:
    """DeepSeek-V4: compressed attention, hyper-connections and hashed routing; prediction layers are a second file."""
    keys = common(config) | weighted(config)
    layers = config.count("num_hidden_layers")
    ratios = config.numbers("compress_ratios")
    keys |= {
        "rope.dimension_count": config.count("qk_rope_head_dim"),
        "attention.q_lora_rank": config.count("q_lora_rank"),
        "attention.sliding_window": config.count("sliding_window"),
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_count": config.count("n_shared_experts"),
        "swiglu_clamp_exp": [config.number("swiglu_limit")] * layers,
        "swiglu_clamp_shexp": [config.number("swiglu_limit")] * layers,
        "attention.indexer.head_count": config.count("index_n_heads"),
        "attention.indexer.key_length": config.count("index_head_dim"),
        "attention.indexer.top_k": config.count("index_topk"),
        "attention.output_group_count": config.count("o_groups"),
        "attention.output_lora_rank": config.count("o_lora_rank"),
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": config.number("compress_rope_theta"),
        "hyper_connection.count": config.count("hc_mult"),
        "hyper_connection.sinkhorn_iterations": config.count("hc_sinkhorn_iters"),
        "hyper_connection.epsilon": config.number("hc_eps"),
        "hash_layer_count": config.count("num_hash_layers"),
        "embedding_length_out": config.count("hidden_size") * config.count("hc_mult"),
    }
    return Converted("deepseek4", keys)


def glm4moe(config: ModelConfig) -> Converted:
    """GLM-4.5 to 4.7."""
    keys = common(config, prediction_layers=config.prediction_layers()) | _shared_experts(config) | weighted(config)
    keys |= {"rope.dimension_count": config.rotated(0.5), "expert_gating_func": 2}
    return Converted(
        "glm4moe",
        keys,
        Extras(
            head_norms=config.flag("use_qk_norm"),
            qkv_bias=config.flag("attention_bias"),
            router_bias=True,
            tied_output=config.flag("tie_word_embeddings"),
        ),
    )


def qwen3moe(config: ModelConfig) -> Converted:
    """Qwen3's mixtures of experts."""
    keys = common(config) | {"expert_feed_forward_length": config.count("moe_intermediate_size")}
    return Converted("qwen3moe", keys, replace(_plain_extras(config), head_norms=True))


def qwen3(config: ModelConfig) -> Converted:
    """Qwen3's dense models."""
    return Converted("qwen3", common(config), replace(_plain_extras(config), head_norms=True))


def llama(config: ModelConfig) -> Converted:
    """Llama and its many relatives without experts."""
    keys = common(config) | {"rope.dimension_count": config.head_dim()}
    return Converted("llama", keys, _plain_extras(config))


def llama4(config: ModelConfig) -> Converted:
    """Llama 4, whose `intermediate_size` is that of the experts."""
    keys = common(config) | {
        "feed_forward_length": config.count("intermediate_size_mlp"),
        "expert_feed_forward_length": config.count("intermediate_size"),
        "interleave_moe_layer_step": config.count("interleave_moe_layer_step"),
        "rope.dimension_count": config.head_dim(),
    }
    return Converted("llama4", keys, _plain_extras(config))


def _plain_extras(config: ModelConfig) -> Extras:
    return Extras(
        qkv_bias=config.flag("attention_bias"),
        rope_table=config.rope.word("rope_type", "type") == "llama3",
        tied_output=config.flag("tie_word_embeddings"),
    )


def gpt_oss(config: ModelConfig) -> Converted:
    """gpt-oss: windows on every second layer, and biases everywhere."""
    keys = common(config) | {
        "attention.sliding_window": config.count("sliding_window"),
        "expert_feed_forward_length": config.count("intermediate_size"),
        "rope.dimension_count": config.head_dim(),
    }
    return Converted("gpt-oss", keys, Extras(qkv_bias=True))


def minimax_m2(config: ModelConfig) -> Converted:
    """MiniMax-M2 to M2.7; the published files have no prediction layers."""
    keys = common(config) | {
        "expert_feed_forward_length": config.count("intermediate_size"),
        "rope.dimension_count": config.count("rotary_dim"),
    }
    return Converted("minimax-m2", keys, Extras(router_bias=True))


def minimax_m3(config: ModelConfig) -> Converted:
    """MiniMax-M3: blocks of the context that an indexer selects."""
    sparse = config.part("sparse_attention_config")
    dense = config.numbers("moe_layer_freq")
    keys = common(config) | {
        "expert_feed_forward_length": config.count("intermediate_size"),
        "rope.dimension_count": config.count("rotary_dim"),
        "expert_shared_count": config.count("n_shared_experts"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_weights_norm": True,
        "attention.indexer.head_count": sparse.count("sparse_num_index_heads"),
        "attention.indexer.key_length": sparse.count("sparse_index_dim"),
        "attention.indexer.top_k": sparse.count("sparse_topk_blocks"),
        "attention.indexer.block_size": sparse.count("sparse_block_size"),
        "attention.indexer.local_blocks": sparse.count("sparse_local_block"),
        "leading_dense_block_count": dense.index(1) if 1 in dense else len(dense),
    }
    return Converted("minimax-m3", keys, Extras(head_norms=True, router_bias=True))


def ernie_moe(config: ModelConfig) -> Converted:
    """ERNIE 4.5's mixtures of experts."""
    shared = config.maybe("moe_num_shared_experts") or 0
    keys = common(config) | {
        "expert_count": config.count("moe_num_experts"),
        "expert_used_count": config.count("moe_k"),
        "interleave_moe_layer_step": config.maybe("moe_layer_interval") or 1,
        "leading_dense_block_count": config.count("moe_layer_start_index"),
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_count": shared,
    }
    if shared:
        keys["expert_shared_feed_forward_length"] = config.count("moe_intermediate_size") * shared
    tied = config.flag("tie_word_embeddings", default=True)  # as in the model's own configuration class
    return Converted("ernie4_5-moe", keys, Extras(router_bias=True, tied_output=tied))


def hunyuan_moe(config: ModelConfig) -> Converted:
    """Hunyuan-A13B; its dynamic scaling is applied to the base of the position encoding."""
    keys = common(config) | {
        "expert_used_count": config.count("moe_topk"),
        "expert_feed_forward_length": config.count("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.count("intermediate_size"),
        "expert_shared_count": config.count("num_shared_expert"),
    }
    if config.rope.word("rope_type", "type") == "dynamic":
        dim = config.head_dim()
        base = config.number("rope_theta", 10000.0)
        keys |= {
            "rope.freq_base": base * config.rope.number("alpha", 1000.0) ** (dim / (dim - 2)),
            "context_length": _HUNYUAN_CONTEXT,
        }
    return Converted("hunyuan-moe", keys, Extras(head_norms=True, tied_output=config.flag("tie_word_embeddings")))


def ling2(config: ModelConfig) -> Converted:
    """Ling 2, such as Ling-1T."""
    keys = common(config, prediction_layers=config.prediction_layers()) | _shared_experts(config) | weighted(config)
    shared = config.count("num_shared_experts")
    keys |= {
        "rope.dimension_count": config.rotated(0.5),
        "expert_shared_feed_forward_length": config.maybe("moe_shared_expert_intermediate_size")
        or config.count("moe_intermediate_size") * shared,
    }
    return Converted("bailingmoe2", keys, Extras(head_norms=True, router_bias=True))
