"""The tensor tables of published Hugging Face checkpoints, from their architectures.

Names and types follow what the quantizers export: ModelOpt (nvfp4, fused llama4 experts), compressed-tensors
(pack-quantized int4), DeepSeek's own fp8 blocks, AutoAWQ and OpenAI's mxfp4. Sources: tests/data/model/hf/README.md.
"""

from collections.abc import Iterator

Stored = tuple[str, list[int]]
Rows = Iterator[tuple[str, Stored]]


def _bf16(name: str, *shape: int) -> tuple[str, Stored]:
    return name, ("BF16", list(shape))


def _nvfp4(module: str, out: int, inner: int) -> Rows:
    """One ModelOpt linear layer."""
    yield f"{module}.weight", ("U8", [out, inner // 2])
    yield f"{module}.weight_scale", ("F8_E4M3", [out, inner // 16])
    yield f"{module}.weight_scale_2", ("F32", [])
    yield f"{module}.input_scale", ("F32", [])


def _nvfp4_stack(module: str, experts: int, inner: int, out: int) -> Rows:
    """ModelOpt's llama4 experts: one stack, packed along the input, with separate scales."""
    yield module, ("U8", [experts, inner // 2, out])
    yield f"{module}_weight_scale", ("F8_E4M3", [experts, inner // 16, out])
    yield f"{module}_weight_scale_2", ("F32", [])
    yield f"{module}_input_scale", ("F32", [])


def scout_nvfp4() -> Rows:
    hidden, ffn, vocab = 5120, 8192, 202048
    yield _bf16("language_model.model.embed_tokens.weight", vocab, hidden)
    yield _bf16("language_model.lm_head.weight", vocab, hidden)
    yield _bf16("language_model.model.norm.weight", hidden)
    for index in range(48):
        layer = f"language_model.model.layers.{index}"
        yield _bf16(f"{layer}.input_layernorm.weight", hidden)
        yield _bf16(f"{layer}.post_attention_layernorm.weight", hidden)
        for name, out, inner in (("q", 5120, hidden), ("k", 1024, hidden), ("v", 1024, hidden), ("o", hidden, 5120)):
            yield from _nvfp4(f"{layer}.self_attn.{name}_proj", out, inner)
        yield _bf16(f"{layer}.feed_forward.router.weight", 16, hidden)
        yield from _nvfp4_stack(f"{layer}.feed_forward.experts.gate_up_proj", 16, hidden, 2 * ffn)
        yield from _nvfp4_stack(f"{layer}.feed_forward.experts.down_proj", 16, ffn, hidden)
        for name, out, inner in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            yield from _nvfp4(f"{layer}.feed_forward.shared_expert.{name}_proj", out, inner)
    yield from _scout_vision()


def _scout_vision() -> Rows:
    width, ffn = 1408, 5632
    yield _bf16("multi_modal_projector.linear_1.weight", 5120, 4096)
    yield _bf16("vision_model.class_embedding", width)
    yield _bf16("vision_model.patch_embedding.linear.weight", width, 588)
    yield _bf16("vision_model.positional_embedding_vlm", 577, width)
    yield _bf16("vision_model.vision_adapter.mlp.fc1.weight", 4096, ffn)
    yield _bf16("vision_model.vision_adapter.mlp.fc2.weight", 4096, 4096)
    for norm in ("vision_model.layernorm_pre", "vision_model.layernorm_post"):
        yield _bf16(f"{norm}.weight", width)
        yield _bf16(f"{norm}.bias", width)
    for index in range(34):
        layer = f"vision_model.model.layers.{index}"
        shapes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"} | {
            "mlp.fc1": (ffn, width),
            "mlp.fc2": (width, ffn),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        for module, shape in shapes.items():
            yield _bf16(f"{layer}.{module}.weight", *shape)
            yield _bf16(f"{layer}.{module}.bias", shape[0])


def _latent_attention(layer: str, hidden: int, heads: int) -> Iterator[tuple[str, int, int]]:
    yield f"{layer}.self_attn.q_a_proj", 1536, hidden
    yield f"{layer}.self_attn.q_b_proj", heads * 192, 1536
    yield f"{layer}.self_attn.kv_a_proj_with_mqa", 576, hidden
    yield f"{layer}.self_attn.kv_b_proj", heads * 256, 512
    yield f"{layer}.self_attn.o_proj", hidden, heads * 128


def _gated(module: str, hidden: int, ffn: int) -> Iterator[tuple[str, int, int]]:
    yield f"{module}.gate_proj", ffn, hidden
    yield f"{module}.up_proj", ffn, hidden
    yield f"{module}.down_proj", hidden, ffn


def _latent_norms(layer: str, hidden: int) -> Rows:
    yield _bf16(f"{layer}.input_layernorm.weight", hidden)
    yield _bf16(f"{layer}.post_attention_layernorm.weight", hidden)
    yield _bf16(f"{layer}.self_attn.q_a_layernorm.weight", 1536)
    yield _bf16(f"{layer}.self_attn.kv_a_layernorm.weight", 512)


def kimi_k25(layers: int = 61) -> Rows:
    """Routed experts in packed int4, the rest in bf16; without the vision tower."""
    hidden = 7168
    yield _bf16("language_model.model.embed_tokens.weight", 163840, hidden)
    yield _bf16("language_model.lm_head.weight", 163840, hidden)
    yield _bf16("language_model.model.norm.weight", hidden)
    for index in range(layers):
        layer = f"language_model.model.layers.{index}"
        yield from _latent_norms(layer, hidden)
        plain = [*_latent_attention(layer, hidden, 64)]
        if index == 0:
            plain += _gated(f"{layer}.mlp", hidden, 18432)
        else:
            plain += _gated(f"{layer}.mlp.shared_experts", hidden, 2048)
            yield _bf16(f"{layer}.mlp.gate.weight", 384, hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", ("F32", [384])
            for expert in range(384):
                for module, out, inner in _gated(f"{layer}.mlp.experts.{expert}", hidden, 2048):
                    yield f"{module}.weight_packed", ("I32", [out, inner // 8])
                    yield f"{module}.weight_scale", ("BF16", [out, inner // 32])
                    yield f"{module}.weight_shape", ("I32", [2])
        for module, out, inner in plain:
            yield _bf16(f"{module}.weight", out, inner)


def deepseek_v3() -> Rows:
    """fp8 in blocks of 128 x 128, one multi-token-prediction layer."""
    hidden = 7168
    yield _bf16("model.embed_tokens.weight", 129280, hidden)
    yield _bf16("lm_head.weight", 129280, hidden)
    yield _bf16("model.norm.weight", hidden)
    for index in range(62):
        layer = f"model.layers.{index}"
        yield from _latent_norms(layer, hidden)
        blocks = [*_latent_attention(layer, hidden, 128)]
        if index < 3:
            blocks += _gated(f"{layer}.mlp", hidden, 18432)
        else:
            yield _bf16(f"{layer}.mlp.gate.weight", 256, hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", ("F32", [256])
            blocks += _gated(f"{layer}.mlp.shared_experts", hidden, 2048)
            for expert in range(256):
                blocks += _gated(f"{layer}.mlp.experts.{expert}", hidden, 2048)
        for module, out, inner in blocks:
            yield f"{module}.weight", ("F8_E4M3", [out, inner])
            yield f"{module}.weight_scale_inv", ("F32", [-(-out // 128), -(-inner // 128)])
    last = "model.layers.61"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _bf16(f"{last}.{name}.weight", hidden)
    yield _bf16(f"{last}.eh_proj.weight", hidden, 2 * hidden)
    yield _bf16(f"{last}.embed_tokens.weight", 129280, hidden)
    yield _bf16(f"{last}.shared_head.head.weight", 129280, hidden)


def gpt_oss_120b() -> Rows:
    hidden, experts, vocab = 2880, 128, 201088
    yield _bf16("model.embed_tokens.weight", vocab, hidden)
    yield _bf16("lm_head.weight", vocab, hidden)
    yield _bf16("model.norm.weight", hidden)
    for index in range(36):
        layer = f"model.layers.{index}"
        yield _bf16(f"{layer}.input_layernorm.weight", hidden)
        yield _bf16(f"{layer}.post_attention_layernorm.weight", hidden)
        for name, out, inner in (("q", 4096, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
            yield _bf16(f"{layer}.self_attn.{name}_proj.weight", out, inner)
            yield _bf16(f"{layer}.self_attn.{name}_proj.bias", out)
        yield _bf16(f"{layer}.self_attn.sinks", 64)
        yield _bf16(f"{layer}.mlp.router.weight", experts, hidden)
        yield _bf16(f"{layer}.mlp.router.bias", experts)
        for name, out in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
            yield f"{layer}.mlp.experts.{name}_blocks", ("U8", [experts, out, hidden // 32, 16])
            yield f"{layer}.mlp.experts.{name}_scales", ("U8", [experts, out, hidden // 32])
            yield _bf16(f"{layer}.mlp.experts.{name}_bias", experts, out)


def qwen25_7b_awq() -> Rows:
    hidden, ffn, vocab = 3584, 18944, 152064
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", ("F16", [vocab, hidden])
    yield "model.norm.weight", ("F16", [hidden])
    for index in range(28):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", ("F16", [hidden])
        linears = [
            (f"{layer}.self_attn.{name}_proj", out, hidden) for name, out in (("q", hidden), ("k", 512), ("v", 512))
        ]
        for module, out, _ in linears:
            yield f"{module}.bias", ("F16", [out])
        linears += [(f"{layer}.self_attn.o_proj", hidden, hidden), *_gated(f"{layer}.mlp", hidden, ffn)]
        for module, out, inner in linears:
            yield f"{module}.qweight", ("I32", [inner, out // 8])
            yield f"{module}.qzeros", ("I32", [inner // 128, out // 8])
            yield f"{module}.scales", ("F16", [inner // 128, out])


def qwen3_next() -> Rows:
    """bf16, three of four layers with linear attention, multi-token prediction in a part of its own."""
    hidden, ffn, vocab = 2048, 512, 151936
    yield _bf16("model.embed_tokens.weight", vocab, hidden)
    yield _bf16("lm_head.weight", vocab, hidden)
    yield _bf16("model.norm.weight", hidden)
    for index in range(48):
        layer = f"model.layers.{index}"
        yield from _qwen_block(layer, hidden, ffn, full=index % 4 == 3)
    yield _bf16("mtp.fc.weight", hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield _bf16(f"mtp.{name}.weight", hidden)
    yield from _qwen_block("mtp.layers.0", hidden, ffn, full=True)


def _qwen_block(layer: str, hidden: int, ffn: int, *, full: bool) -> Rows:
    yield _bf16(f"{layer}.input_layernorm.weight", hidden)
    yield _bf16(f"{layer}.post_attention_layernorm.weight", hidden)
    if full:
        for name, out, inner in (("q", 8192, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
            yield _bf16(f"{layer}.self_attn.{name}_proj.weight", out, inner)
        yield _bf16(f"{layer}.self_attn.q_norm.weight", 256)
        yield _bf16(f"{layer}.self_attn.k_norm.weight", 256)
    else:
        mixer = f"{layer}.linear_attn"
        yield _bf16(f"{mixer}.in_proj_qkvz.weight", 12288, hidden)
        yield _bf16(f"{mixer}.in_proj_ba.weight", 64, hidden)
        yield _bf16(f"{mixer}.out_proj.weight", hidden, 4096)
        yield _bf16(f"{mixer}.conv1d.weight", 8192, 1, 4)
        for name, size in (("A_log", 32), ("dt_bias", 32), ("norm.weight", 128)):
            yield _bf16(f"{mixer}.{name}", size)
    yield _bf16(f"{layer}.mlp.gate.weight", 512, hidden)
    yield _bf16(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden)
    for module, out, inner in _gated(f"{layer}.mlp.shared_expert", hidden, ffn):
        yield _bf16(f"{module}.weight", out, inner)
    for expert in range(512):
        for module, out, inner in _gated(f"{layer}.mlp.experts.{expert}", hidden, ffn):
            yield _bf16(f"{module}.weight", out, inner)
