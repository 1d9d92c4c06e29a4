"""All tensors of a model, in file order."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.model.architectures import layer_of
from tokenmill.model.tensor_table import attention, hybrid
from tokenmill.model.tensor_table.parts import ArchitectureKeys, Extras, TensorSlot, prediction

_Layer = Callable[[ArchitectureKeys, int, Extras], Iterator[TensorSlot]]
_ARCHITECTURES: Mapping[str, _Layer] = {
    "deepseek2": attention.deepseek2,
    "deepseek32": attention.sparse_deepseek,
    "glm-dsa": attention.sparse_deepseek,
    "deepseek4": attention.deepseek4,
    "llama4": attention.llama4,
    "glm4moe": attention.glm4moe,
    "qwen3moe": attention.qwen3moe,
    "gpt-oss": attention.gpt_oss,
    "qwen3": attention.plain,
    "llama": attention.plain,
    "minimax-m2": attention.minimax_m2,
    "minimax-m3": attention.minimax_m3,
    "ernie4_5-moe": attention.ernie_moe,
    "hunyuan-moe": attention.hunyuan_moe,
    "bailingmoe2": attention.ling2,
    "qwen3next": hybrid.qwen3next,
    "qwen35moe": hybrid.qwen35moe,
    "kimi-k3": hybrid.kimi_k3,
    "bailingmoe3": hybrid.ling3,
    "nemotron_h_moe": hybrid.nemotron_h,
}
# prediction layers that store their own copies of the embedding and the output matrix
_OWN_EMBEDDINGS = frozenset({"deepseek32", "glm-dsa", "glm4moe"})


def file_order(name: str) -> tuple[int, str]:
    """Sort key: the order in which llama-quantize writes tensors."""
    layer = layer_of(name)
    return (-1 if layer is None else layer), name


def slots(architecture: str, keys: Mapping[str, Any], vocabulary: int, extras: Extras) -> list[TensorSlot]:
    """All tensors of a model, in file order. Raises `UsageError` for an unknown architecture."""
    build = _ARCHITECTURES.get(architecture)
    if build is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UsageError(f"the tensors of architecture {architecture!r} are unknown", hint=f"known: {known}")
    own = ArchitectureKeys(architecture, keys)
    found = list(_outside(own, vocabulary, extras))
    for layer in range(own["block_count"]):
        found += [(f"blk.{layer}.{name}", shape) for name, shape in build(own, layer, extras)]
    for layer in range(own.trunk, own["block_count"]):
        more = prediction(own, vocabulary, embeddings=architecture in _OWN_EMBEDDINGS)
        found += [(f"blk.{layer}.{name}", shape) for name, shape in more]
    return sorted(found, key=lambda slot: file_order(slot[0]))


def _outside(own: ArchitectureKeys, vocabulary: int, extras: Extras) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    yield "token_embd.weight", (embed, vocabulary)
    yield "output_norm.weight", (embed,)
    if not extras.tied_output:
        yield "output.weight", (embed, vocabulary)
    if extras.rope_table:
        yield "rope_freqs.weight", (own["rope.dimension_count"] // 2,)
    if own.get("attn_res.block_size"):
        yield "output_res_score.weight", (embed,)
    if streams := own.get("hyper_connection.count"):
        yield "output_hc_fn.weight", (streams * embed, streams)
        yield "output_hc_base.weight", (streams,)
        yield "output_hc_scale.weight", (1,)
