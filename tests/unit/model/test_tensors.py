import pytest

from tokenmill.model.architectures import classify, layer_of
from tokenmill.model.profile import TensorClass

C = TensorClass


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("token_embd.weight", C.EMBEDDING),
        ("per_layer_token_embd.weight", C.EMBEDDING),
        ("token_embd_norm.weight", C.NORM),
        ("output.weight", C.OUTPUT),
        ("output_norm.weight", C.NORM),
        ("rope_freqs.weight", C.OTHER),
        ("blk.0.attn_norm.weight", C.NORM),
        ("blk.0.attn_q_a_norm.weight", C.NORM),
        ("blk.0.ffn_norm.weight", C.NORM),
        ("blk.0.post_ffw_norm_1.weight", C.NORM),
        ("blk.0.ffn_norm_exps.weight", C.NORM),
        ("blk.60.attn_kv_a_mqa.weight", C.ATTENTION),
        ("blk.3.attn_k_b.weight", C.ATTENTION),
        ("blk.3.attn_sinks.weight", C.ATTENTION),
        ("blk.3.ssm_in.weight", C.ATTENTION),
        ("blk.3.indexer.attn_k.weight", C.ATTENTION),
        ("blk.3.shortconv.in_proj.weight", C.ATTENTION),
        ("blk.0.ffn_up.weight", C.DENSE_FFN),
        ("blk.0.ffn_gate.weight", C.DENSE_FFN),
        ("blk.0.ffn_down.bias", C.DENSE_FFN),
        ("blk.1.ffn_gate_inp.weight", C.ROUTER),
        ("blk.1.exp_probs_b.bias", C.ROUTER),
        ("blk.1.ffn_gate_inp_shexp.weight", C.SHARED_EXPERTS),
        ("blk.1.ffn_down_shexp.weight", C.SHARED_EXPERTS),
        ("blk.1.ffn_gate_exps.weight", C.ROUTED_EXPERTS),
        ("blk.1.ffn_gate_up_exps.weight", C.ROUTED_EXPERTS),
        ("blk.1.ffn_down_exps.bias", C.ROUTED_EXPERTS),
        ("blk.1.ffn_up.7.weight", C.ROUTED_EXPERTS),
        ("blk.61.nextn.eh_proj.weight", C.MTP),
        ("nextn.pre_projection.weight", C.MTP),
        ("something.else", C.OTHER),
        ("blk.4.mystery.weight", C.OTHER),
    ],
)
def test_by_name(name: str, cls: TensorClass) -> None:
    assert classify(name, (64, 64)) is cls


def test_by_shape_if_the_name_is_unknown() -> None:
    assert classify("blk.4.mystery.weight", (64, 32, 16), experts=16) is C.ROUTED_EXPERTS
    assert classify("blk.4.mystery.weight", (64, 32, 15), experts=16) is C.OTHER


def test_layers_past_the_last_are_multi_token_prediction() -> None:
    assert classify("blk.60.attn_q.weight", (64, 64), layers=61) is C.ATTENTION
    assert classify("blk.61.attn_q.weight", (64, 64), layers=61) is C.MTP
    assert classify("blk.61.ffn_up_exps.weight", (64, 64, 8), layers=61) is C.MTP


def test_layer_of() -> None:
    assert layer_of("blk.17.attn_q.weight") == 17
    assert layer_of("output.weight") is None
    assert layer_of("enc.blk.3.attn_q.weight") == 3
