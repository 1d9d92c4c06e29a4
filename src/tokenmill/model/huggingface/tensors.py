"""Classifies the tensors of a Hugging Face checkpoint by name and, if the name is not enough, by shape.

Names are dotted module paths that differ between model families; the patterns match the words that families share. A
scale or zero point has the class of its weight.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from tokenmill.model.huggingface.kv_layout import Projections
from tokenmill.model.huggingface.safetensors_header import StoredTensor
from tokenmill.model.profile import TensorClass


class TensorRole(NamedTuple):
    """Class and layer of a tensor."""

    cls: TensorClass
    layer: int | None  # None: outside the layers of the language model


EXPERT_INDEX = re.compile(r"(?<=experts\.)(?:expert_)?\d{1,6}(?=\.)")
"""The number of one expert inside a name."""

# Last parts of names that describe storage. Tensors of _OVERHEAD contain no parameters.
_OVERHEAD = (
    "weight_scale_inv",
    "weight_scale_2",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_format",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "activation_scale",
    "pre_quant_scale",
    "scale_inv",
    "scales",
    "qzeros",
    "g_idx",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "bitsandbytes__nf4",
    "bitsandbytes__fp4",
    "SCB",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "k_zero_point",
    "v_zero_point",
)
_WEIGHTS = ("qweight", "weight_packed", "weight", "blocks", "bias", "biases", "scale")
_STORAGE = re.compile(rf"(?:\.weight(?=\.))?(?:\.quant_state)?[._]({'|'.join((*_OVERHEAD, *_WEIGHTS))})$")
OVERHEAD = frozenset(_OVERHEAD)


def storage(name: str) -> tuple[str, str]:
    """Split a name into module and storage part, such as `(..q_proj, weight_scale)`."""
    match = _STORAGE.search(name)
    return (name[: match.start()], match[1]) if match else (name, "")


_LAYER = re.compile(r"(?:^|\.)(?:(?:mtp_)?layers|layer|blocks|block|h)\.(\d{1,5})\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PREDICTS_FURTHER = re.compile(r"(?:^|\.)(?:mtp|nextn|eagle|medusa)[^.]*(?:\.|$)", re.IGNORECASE)
_OTHER_MODALITIES = re.compile(
    r"(?:^|[._])(?:vision|visual|image|audio|speech|video|vit|clip|siglip|sam_model|multi_modal|multimodal|mm_projector"
    r"|talker|code2wav|token2wav|vqmodel|perceiver|resampler)",
    re.IGNORECASE,
)


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.)(?:{'|'.join(words)})(?=\.|$)", re.IGNORECASE)


_NORM = re.compile(r"(?:^|\.)(?:[^.]*norm[^.]*|(?:[a-z0-9]+_)?ln_?[a-z0-9]*)(?:\.\d+)?$", re.IGNORECASE)
_ROUTER = _words(r"(?:moe_)?router\w*", "e_score_correction_bias", r"expert_bias\w*", "moe_statics", "tid2eid", "wg")
_GATE = _words("gate", "moe_gate", "gating")
_SHARED = _words(r"shared?_experts?\w*", r"shared_(?:mlp|ffn)\w*")
_ROUTED = _words(r"(?:local_|moe_|routed_)?experts\w*", r"expert_\d+")
_MIXER = _words("mixer")  # in nemotron_h: attention, state-space or feed-forward
_ATTENTION = _words(
    r"\w*attn\w*",
    r"\w*attention\w*",
    r"mamba\w*",
    "ssm",
    "temporal_block",
    "conv",
    r"short_?conv\w*",
    "indexer",
    r"time_mix\w*",
    "token_mixer",
    r"\w*lstm\w*",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "wqkv",
    "wq",
    "wk",
    "wv",
    "wo",
)
_DENSE = _words(
    r"mlp\w*",
    r"ffn\w*",
    "ff",
    r"feed_?forward\w*",
    r"block_sparse_moe\w*",
    "moe",
    r"channel_mix\w*",
    r"dense\w*",
    r"fc\d*",
    "fc_in",
    "fc_out",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
    "w1",
    "w2",
    "w3",
    "w12",
    "intermediate",
    "output",
    r"wi\w*",
)
_FEED_FORWARD_PARTS = _words("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2")
_EMBEDDING = _words(r"\w*embed\w*", "wte", "wpe", "shared")
_OUTPUT = _words(r"lm_head\w*", "embed_out", "output", "output_layer", "output_projection", "proj_out", "head")


def classify_hf(
    name: str, shape: tuple[int, ...], *, experts: int | None = None, layers: int | None = None
) -> TensorRole:
    """Class and layer of a tensor; `shape` has the slowest dimension first, as in the file.

    `experts` is the number of experts (None: no experts; 0: unknown), `layers` the number of decoding layers; later
    layers are for multi-token prediction.
    """
    found = _LAYER.search(name)
    index = int(found[1]) if found else None
    before = name[: found.start()] if found else name
    if _OTHER_MODALITIES.search(before):
        return TensorRole(TensorClass.OTHER, None)
    if further := _PREDICTS_FURTHER.search(name):
        if found is None or index is None or layers is None:
            return TensorRole(TensorClass.MTP, None)
        # a separate module counts its layers from 0; they come after the decoding layers
        return TensorRole(TensorClass.MTP, index + layers if further.start() <= found.start() else index)
    if index is not None and layers is not None and index >= layers:
        return TensorRole(TensorClass.MTP, index)
    module, _ = storage(name)
    if found is None:
        return TensorRole(_outside(module), None)
    return TensorRole(_inside(_NUMBER.sub("0", module[found.end() :]), shape, experts), index)


def _outside(module: str) -> TensorClass:
    if _NORM.search(module):
        return TensorClass.NORM
    if _OUTPUT.search(module):
        return TensorClass.OUTPUT
    return TensorClass.EMBEDDING if _EMBEDDING.search(module) else TensorClass.OTHER


@lru_cache(maxsize=8192)  # layers have equal modules
def _inside(module: str, shape: tuple[int, ...], experts: int | None) -> TensorClass:
    if _NORM.search(module):
        return TensorClass.NORM
    attention = _ATTENTION.search(module)
    dense = _DENSE.search(module)
    attends = attention is not None and (dense is None or attention.start() <= dense.start())
    if experts is not None and (mixture := _mixture(module, shape, experts, attends=attends)):
        return mixture
    if _MIXER.search(module):
        return TensorClass.DENSE_FFN if _FEED_FORWARD_PARTS.search(module) else TensorClass.ATTENTION
    if attends:
        return TensorClass.ATTENTION
    # in models without experts, `shared_mlp` (granite) and `gate` are parts of the feed-forward network
    return TensorClass.DENSE_FFN if dense or _SHARED.search(module) or _GATE.search(module) else TensorClass.OTHER


def _mixture(module: str, shape: tuple[int, ...], experts: int, *, attends: bool) -> TensorClass | None:
    if _SHARED.search(module):
        return TensorClass.SHARED_EXPERTS
    if _ROUTER.search(module) or (_GATE.search(module) and not attends):
        return TensorClass.ROUTER
    if _ROUTED.search(module) or (not attends and len(shape) == 3 and shape[0] == experts):
        return TensorClass.ROUTED_EXPERTS
    return None


_OTHER_ATTENTION = re.compile(r"cross_attn|encoder_attn|crossattention|EncDecAttention|indexer")
_KEYS_OR_VALUES = re.compile(r"(?:k|v|kv|qkv|key|value|w_?k|w_?v|w_?kv|w_?qkv|w_pack|c_attn|query_key_value)(?:_|$)")
_RECURRENCE = re.compile(r"\.A_log$|\.conv1d\.|\.conv\.conv\.|\.time_(?:mix|decay)|\.(?:mamba|ssm)\.")


def projections(rows: Iterable[tuple[str, StoredTensor, TensorRole]]) -> Projections:
    """Collect facts about attention from all tensors."""
    widths: dict[str, dict[int, int]] = {"k_proj": {}, "v_proj": {}}
    queries = set[int]()
    keys = set[int]()
    stateful = set[int]()
    attending = set[int]()
    for name, stored, place in rows:
        if place.cls is not TensorClass.ATTENTION or place.layer is None or _OTHER_ATTENTION.search(name):
            continue
        attending.add(place.layer)
        module, part = storage(name)
        leaf = module.rpartition(".")[2]
        if _RECURRENCE.search(name):
            stateful.add(place.layer)
        if leaf == "q_proj":
            queries.add(place.layer)
        elif _KEYS_OR_VALUES.match(leaf.lower()):
            keys.add(place.layer)
        if leaf in widths and (width := _rows(part, stored)):
            # the matrix takes precedence over the scales of AWQ and GPTQ
            if part == "scales":
                widths[leaf].setdefault(place.layer, width)
            else:
                widths[leaf][place.layer] = width
    return Projections(
        k_rows=widths["k_proj"],
        v_rows=widths["v_proj"],
        query_only=frozenset(queries - keys),
        stateful=frozenset(stateful - queries - keys),
        attending=frozenset(attending),
    )


def _rows(part: str, stored: StoredTensor) -> int | None:
    """Number of outputs of a projection; None for flattened matrices (bitsandbytes)."""
    if len(stored.shape) != 2:
        return None
    rows, columns = stored.shape
    if part in ("weight", "weight_packed"):
        return rows if columns > 1 else None
    return columns if part == "scales" and stored.dtype in ("F16", "BF16", "F32") else None
