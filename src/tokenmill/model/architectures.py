"""Classes and layers of tensors by their names in GGUF files."""

import re

from tokenmill.model.profile import TensorClass

_LAYER = re.compile(r"(?:^|\.)blk\.(\d+)\.(.+)$")

# Matched with the part of the name after `blk.N.`; the first match wins, so that `ffn_gate_inp` is a router.
_IN_LAYER: tuple[tuple[re.Pattern[str], TensorClass], ...] = tuple(
    (re.compile(pattern), cls)
    for pattern, cls in (
        (r"nextn\.", TensorClass.MTP),
        (r"(ffn_gate_inp_shexp|ffn_(gate|up|down|gate_up)_shexp)", TensorClass.SHARED_EXPERTS),
        (r"(ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid)", TensorClass.ROUTER),
        (r"ffn_(gate|up|down|gate_up|up_gate)_(exps|chexps)", TensorClass.ROUTED_EXPERTS),
        (r"ffn_(gate|up|down)\.\d+\.", TensorClass.ROUTED_EXPERTS),  # one tensor per expert, before 2024
        (r"attn_v_exps", TensorClass.ROUTED_EXPERTS),
        (r"[a-z_0-9.]*norm[a-z_0-9]*(\.|$)", TensorClass.NORM),
        (r"(attn_|ssm_|hc_|time_mix_|shortconv\.|indexer|cross_attn|vis_attn|laurel_)", TensorClass.ATTENTION),
        (r"(ffn_|channel_mix_|vis_)", TensorClass.DENSE_FFN),
    )
)
_OUTSIDE: tuple[tuple[re.Pattern[str], TensorClass], ...] = tuple(
    (re.compile(pattern), cls)
    for pattern, cls in (
        (r"nextn\.", TensorClass.MTP),
        (r"(token_embd|per_layer_token_embd|position_embd|token_types)\.", TensorClass.EMBEDDING),
        (r"[a-z_0-9.]*norm[a-z_0-9]*(\.|$)", TensorClass.NORM),
        (r"(output|cls)(\.|_hc_|_res_)", TensorClass.OUTPUT),
    )
)


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None if it is outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def classify(
    name: str, shape: tuple[int, ...], *, experts: int | None = None, layers: int | None = None
) -> TensorClass:
    """The class of a tensor.

    `experts` is the model's number of experts, `layers` its number of decoding layers; later layers are for multi-token
    prediction.
    """
    match = _LAYER.search(name)
    if match is None:
        return _first(_OUTSIDE, name) or TensorClass.OTHER
    if layers is not None and int(match[1]) >= layers:
        return TensorClass.MTP
    known = _first(_IN_LAYER, match[2])
    if known is not None:
        return known
    # a tensor with an unknown name and one matrix per expert contains the experts
    if experts and len(shape) == 3 and shape[2] == experts:
        return TensorClass.ROUTED_EXPERTS
    return TensorClass.OTHER


def _first(table: tuple[tuple[re.Pattern[str], TensorClass], ...], name: str) -> TensorClass | None:
    return next((cls for pattern, cls in table if pattern.match(name)), None)
