"""Classes of Hugging Face tensors, one line per naming scheme."""

import pytest

from tokenmill.model.huggingface.tensors import EXPERT_INDEX, OVERHEAD, classify_hf, storage
from tokenmill.model.profile import TensorClass

MIXTURE = {"experts": 8, "layers": 61}
DENSE = {"experts": None, "layers": 32}

CASES = [
    # llama and its many descendants
    ("model.embed_tokens.weight", (32000, 4096), DENSE, "embedding", None),
    ("lm_head.weight", (32000, 4096), DENSE, "output", None),
    ("model.norm.weight", (4096,), DENSE, "norm", None),
    ("model.layers.3.self_attn.q_proj.weight", (4096, 4096), DENSE, "attention", 3),
    ("model.layers.3.self_attn.k_proj.bias", (4096,), DENSE, "attention", 3),
    ("model.layers.3.self_attn.rotary_emb.inv_freq", (64,), DENSE, "attention", 3),
    ("model.layers.3.self_attn.q_norm.weight", (128,), DENSE, "norm", 3),
    ("model.layers.3.mlp.gate_proj.weight", (11008, 4096), DENSE, "dense_ffn", 3),
    ("model.layers.3.post_attention_layernorm.weight", (4096,), DENSE, "norm", 3),
    # mixtures
    ("model.layers.3.mlp.gate.weight", (8, 4096), MIXTURE, "router", 3),
    ("model.layers.3.mlp.gate.e_score_correction_bias", (8,), MIXTURE, "router", 3),
    ("model.layers.3.mlp.experts.7.down_proj.weight", (4096, 1024), MIXTURE, "routed_experts", 3),
    ("model.layers.3.mlp.experts.*.down_proj.weight", (4096, 1024), MIXTURE, "routed_experts", 3),
    ("model.layers.3.mlp.shared_experts.up_proj.weight", (1024, 4096), MIXTURE, "shared_experts", 3),
    ("model.layers.3.mlp.shared_expert.up_proj.weight", (1024, 4096), MIXTURE, "shared_experts", 3),
    ("model.layers.3.mlp.shared_expert_gate.weight", (1, 4096), MIXTURE, "shared_experts", 3),
    ("model.layers.3.mlp.gate_proj.weight", (11008, 4096), MIXTURE, "dense_ffn", 3),
    ("model.layers.0.block_sparse_moe.gate.weight", (8, 4096), MIXTURE, "router", 0),
    ("model.layers.0.block_sparse_moe.experts.0.w1.weight", (14336, 4096), MIXTURE, "routed_experts", 0),
    ("model.layers.0.block_sparse_moe.input_linear.weight", (8, 1024, 1536), MIXTURE, "routed_experts", 0),
    ("model.layers.0.block_sparse_moe.router.layer.weight", (8, 1536), MIXTURE, "router", 0),
    ("transformer.blocks.0.ffn.experts.mlp.w1", (86016, 6144), MIXTURE, "routed_experts", 0),
    ("transformer.blocks.0.ffn.router.layer.weight", (8, 6144), MIXTURE, "router", 0),
    ("model.layers.1.mlp.gate.wg.weight", (8, 4096), MIXTURE, "router", 1),
    ("model.layers.1.mlp.shared_mlp.gate_and_up_proj.weight", (6144, 4096), MIXTURE, "shared_experts", 1),
    ("backbone.layers.1.mixer.experts.3.up_proj.weight", (1856, 2688), MIXTURE, "routed_experts", 1),
    ("backbone.layers.1.mixer.gate.weight", (8, 2688), MIXTURE, "router", 1),
    # llama4: stacked experts, and ModelOpt's tensors next to them
    ("language_model.model.layers.5.feed_forward.experts.gate_up_proj", (8, 5120, 16384), MIXTURE, "routed_experts", 5),
    (
        "language_model.model.layers.5.feed_forward.experts.gate_up_proj_weight_scale",
        (8, 320, 16384),
        MIXTURE,
        "routed_experts",
        5,
    ),
    ("language_model.model.layers.5.feed_forward.router.weight", (8, 5120), MIXTURE, "router", 5),
    (
        "language_model.model.layers.5.feed_forward.shared_expert.down_proj.weight",
        (5120, 8192),
        MIXTURE,
        "shared_experts",
        5,
    ),
    ("language_model.lm_head.weight", (202048, 5120), MIXTURE, "output", None),
    # gpt-oss
    ("model.layers.5.mlp.experts.gate_up_proj_blocks", (8, 5760, 90, 16), MIXTURE, "routed_experts", 5),
    ("model.layers.5.mlp.experts.down_proj_bias", (8, 2880), MIXTURE, "routed_experts", 5),
    ("model.layers.5.self_attn.sinks", (64,), MIXTURE, "attention", 5),
    # scales and zero points go with their weight
    ("model.layers.3.mlp.experts.7.down_proj.weight_scale_inv", (56, 16), MIXTURE, "routed_experts", 3),
    ("model.layers.3.self_attn.q_proj.qzeros", (32, 512), DENSE, "attention", 3),
    ("model.layers.3.mlp.down_proj.weight_packed", (4096, 1376), DENSE, "dense_ffn", 3),
    ("model.layers.3.self_attn.k_proj.k_scale", (), DENSE, "attention", 3),
    # latent and sparse attention
    ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), MIXTURE, "attention", 3),
    ("model.layers.3.self_attn.kv_a_layernorm.weight", (512,), MIXTURE, "norm", 3),
    ("model.layers.3.self_attn.indexer.wk.weight", (128, 7168), MIXTURE, "attention", 3),
    # recurrent layers have the class of attention
    ("model.layers.0.linear_attn.in_proj_qkvz.weight", (12288, 2048), MIXTURE, "attention", 0),
    ("model.layers.0.linear_attn.A_log", (32,), MIXTURE, "attention", 0),
    ("model.layers.0.mamba.in_proj.weight", (9000, 2048), DENSE, "attention", 0),
    ("backbone.layers.0.mixer.in_proj.weight", (9000, 2048), DENSE, "attention", 0),
    ("backbone.layers.1.mixer.up_proj.weight", (9000, 2048), DENSE, "dense_ffn", 1),
    ("model.layers.0.conv.in_proj.weight", (6144, 2048), DENSE, "attention", 0),
    # without a mixture these words mean the feed-forward network
    ("model.layers.0.shared_mlp.input_linear.weight", (16384, 2048), DENSE, "dense_ffn", 0),
    ("model.layers.0.mlp.gate.weight", (16384, 2048), DENSE, "dense_ffn", 0),
    # multi-token prediction: layers past the last, or a part of its own
    ("model.layers.61.eh_proj.weight", (7168, 14336), MIXTURE, "mtp", 61),
    ("model.layers.61.mlp.experts.0.up_proj.weight", (2048, 7168), MIXTURE, "mtp", 61),
    ("model.layers.61.embed_tokens.weight", (129280, 7168), MIXTURE, "mtp", 61),
    ("mtp.layers.0.self_attn.q_proj.weight", (8192, 2048), MIXTURE, "mtp", 61),
    ("mtp.fc.weight", (2048, 4096), MIXTURE, "mtp", None),
    ("model.mtp_layers.0.input_proj.weight", (4096, 8192), MIXTURE, "mtp", 61),
    # older names
    ("transformer.wte.weight", (50257, 768), DENSE, "embedding", None),
    ("transformer.wpe.weight", (1024, 768), DENSE, "embedding", None),
    ("transformer.h.0.attn.c_attn.weight", (768, 2304), DENSE, "attention", 0),
    ("transformer.h.0.mlp.c_proj.weight", (3072, 768), DENSE, "dense_ffn", 0),
    ("transformer.h.0.ln_1.weight", (768,), DENSE, "norm", 0),
    ("transformer.ln_f.bias", (768,), DENSE, "norm", None),
    ("gpt_neox.layers.0.attention.query_key_value.weight", (18432, 6144), DENSE, "attention", 0),
    ("gpt_neox.layers.0.attention.dense.weight", (6144, 6144), DENSE, "attention", 0),
    ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", (24576, 6144), DENSE, "dense_ffn", 0),
    ("embed_out.weight", (50432, 6144), DENSE, "output", None),
    ("model.tok_embeddings.weight", (92544, 4096), DENSE, "embedding", None),
    ("output.weight", (92544, 4096), DENSE, "output", None),
    # modalities other than text
    ("vision_tower.vision_model.encoder.layers.3.self_attn.q_proj.weight", (1152, 1152), DENSE, "other", None),
    ("model.visual.blocks.3.attn.qkv.weight", (3456, 1152), DENSE, "other", None),
    ("vision_model.embeddings.position_embedding.weight", (729, 1152), DENSE, "other", None),
    ("multi_modal_projector.linear_1.weight", (5120, 4096), DENSE, "other", None),
    ("mm_projector.pre_norm.weight", (1152,), DENSE, "other", None),
    ("model.image_newline", (4096,), DENSE, "other", None),
    # unknown names: the shape identifies a stack of experts
    ("model.layers.2.wobble.frob", (8, 100, 100), MIXTURE, "routed_experts", 2),
    ("model.layers.2.wobble.frob", (9, 100, 100), MIXTURE, "other", 2),
    ("model.layers.2.self_attn.frob", (8, 100, 100), MIXTURE, "attention", 2),
    ("wobble", (3,), MIXTURE, "other", None),
    ("model.layers.123456789.mlp.up_proj.weight", (3, 3), DENSE, "other", None),
]


@pytest.mark.parametrize(("name", "shape", "model", "cls", "layer"), CASES, ids=lambda value: str(value)[:70])
def test_class_and_layer(
    name: str, shape: tuple[int, ...], model: dict[str, int | None], cls: str, layer: int | None
) -> None:
    assert classify_hf(name, shape, **model) == (TensorClass(cls), layer)


def test_a_mixture_of_unknown_size() -> None:
    assert classify_hf("model.layers.0.mlp.experts.3.w1.weight", (2, 2), experts=0).cls is TensorClass.ROUTED_EXPERTS


def test_without_a_layer_count_nothing_counts_as_multi_token_prediction() -> None:
    assert classify_hf("model.layers.61.mlp.up_proj.weight", (2, 2)) == (TensorClass.DENSE_FFN, 61)


@pytest.mark.parametrize(
    ("name", "module", "part"),
    [
        ("a.q_proj.weight", "a.q_proj", "weight"),
        ("a.q_proj.weight_scale", "a.q_proj", "weight_scale"),
        ("a.q_proj.weight_scale_inv", "a.q_proj", "weight_scale_inv"),
        ("a.q_proj.weight_scale_2", "a.q_proj", "weight_scale_2"),
        ("a.q_proj.weight.absmax", "a.q_proj", "absmax"),
        ("a.q_proj.weight.quant_state.bitsandbytes__nf4", "a.q_proj", "bitsandbytes__nf4"),
        ("a.experts.gate_up_proj_weight_scale", "a.experts.gate_up_proj", "weight_scale"),
        ("a.experts.gate_up_proj_blocks", "a.experts.gate_up_proj", "blocks"),
        ("a.experts.gate_up_proj_scales", "a.experts.gate_up_proj", "scales"),
        ("a.experts.gate_up_proj", "a.experts.gate_up_proj", ""),
        ("a.w1.scale", "a.w1", "scale"),
    ],
)
def test_storage_splits_a_name(name: str, module: str, part: str) -> None:
    assert storage(name) == (module, part)


def test_overhead_is_never_a_weight() -> None:
    assert not OVERHEAD & {"weight", "qweight", "weight_packed", "blocks", "bias"}


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts.*.up_proj.weight"),
        ("decoder.block.3.layer.1.mlp.experts.expert_5.wi.weight", "decoder.block.3.layer.1.mlp.experts.*.wi.weight"),
        ("model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.gate_up_proj"),
    ],
)
def test_expert_numbers_fold(name: str, folded: str) -> None:
    assert EXPERT_INDEX.sub("*", name, count=1) == folded
