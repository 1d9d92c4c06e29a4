"""Settings and models for tests of ik_llama.cpp's memory."""

from dataclasses import replace

from tokenmill.model.profile import Experts, LayerCache, Profile, Tensor, TensorClass
from tokenmill.model.read import read
from tokenmill.model.tensor_types import tensor_bytes
from tokenmill.planner.plan import Settings


def settings(context: int, ubatch: int, cache_type: str = "q8_0", *, flash: bool = True) -> Settings:
    return Settings(
        engine="ik_llama",
        context=context,
        sequences=1,
        ubatch=ubatch,
        batch=max(ubatch, 2048),
        threads=32,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        threads_batch=64,
        flash_attention=flash,
        mmap=False,
        mlock=False,
        repack=False,
        cache_ram_bytes=0,
    )


def model(name: str, **types: str) -> Profile:
    """A catalogue model with other types for some expert tensors: `up="IQ3_KS"`, or `experts=` for all of them."""
    profile = read(name)
    return replace(profile, tensors=tuple(_retyped(tensor, types) for tensor in profile.tensors))


def _retyped(tensor: Tensor, types: dict[str, str]) -> Tensor:
    for part, kind in types.items():
        if f"ffn_{part}_exps" in tensor.name or (part == "experts" and "_exps" in tensor.name):
            return replace(tensor, type=kind, bytes=tensor_bytes(kind, tensor.shape))
    return tensor


def minimax_m2(experts: str) -> Profile:
    """The shape of MiniMax-M2.5: 62 layers of 256 experts, ordinary attention."""
    embed, inner, count, layers = 3072, 1536, 256, 62
    tensors = [
        _tensor(f"blk.{layer}.{name}", shape, kind, cls, layer)
        for layer in range(layers)
        for name, shape, kind, cls in (
            ("attn_output.weight", (6144, embed), "Q8_0", TensorClass.ATTENTION),
            ("exp_probs_b.bias", (count,), "F32", TensorClass.ROUTER),
            ("ffn_down_exps.weight", (inner, embed, count), experts, TensorClass.ROUTED_EXPERTS),
            ("ffn_gate_exps.weight", (embed, inner, count), experts, TensorClass.ROUTED_EXPERTS),
            ("ffn_up_exps.weight", (embed, inner, count), experts, TensorClass.ROUTED_EXPERTS),
        )
    ]
    tensors.append(_tensor("output.weight", (embed, 200064), "Q8_0", TensorClass.OUTPUT, None))
    return Profile(
        name="minimax-m2.5",
        format="catalog",
        architecture="minimax-m2",
        tensors=tuple(tensors),
        files=(),
        layers=layers,
        cache=(LayerCache("full", 1024, 1024),) * layers,
        experts=Experts(count, 8),
        embedding_length=embed,
        heads=48,
        kv_heads=8,
    )


def _tensor(name: str, shape: tuple[int, ...], kind: str, cls: TensorClass, layer: int | None) -> Tensor:
    elements = 1
    for size in shape:
        elements *= size
    return Tensor(name, cls, layer, shape, kind, tensor_bytes(kind, shape), elements)
