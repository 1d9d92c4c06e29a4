"""How ik_llama.cpp's own `--fit` divides a model: its rule, with its mistakes, not ours.

  1. Layers, experts and all, are dealt out in order by each GPU's free memory less its margin, the output last.
  2. On each GPU, experts go to host memory from its last layer on, until what is left fits in that memory.

Whole layers are far larger than the output, so step 1 hardly notices it; step 2 then leaves the last GPU as many
experts as the others. It ends up fuller by the output matrix, or, when that is too much, emptier by a layer's experts.

The compute buffer is only estimated (expanded K and V in 32 bits, two thirds of it) and, since 28 March 2026, not
taken off at all: the branch that does it wants no `tensor_split`, and the tools always pass one. The margin has to
make up for it. Divided here in whole numbers, in the engine in 32-bit floats. Not covered: `-sm graph`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tokenmill.model.blocks import BY_NAME
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.ik_attention import latent_of
from tokenmill.planner.ik_memory import BEFORE_FIT_BYTES, TODAY, kv_row_bytes
from tokenmill.planner.ik_options import IkOptions
from tokenmill.planner.layer_tensors import by_layer
from tokenmill.planner.plan import Settings
from tokenmill.planner.sketch import F32
from tokenmill.units import MIB

DEFAULT_MARGIN_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True)
class FitSizes:
    """What the engine thinks everything takes, in bytes, as it prints it before loading."""

    layers: tuple[int, ...]  # weights, derived weights and cache
    experts: tuple[int, ...]  # of them, what can go to host memory
    head: int
    compute: int  # on every GPU


@dataclass(frozen=True, slots=True)
class OwnFit:
    """Where the engine puts everything by itself."""

    layers: tuple[int | None, ...]  # GPU of each layer; None: the processors
    head: int  # GPU of the output
    experts: tuple[tuple[int, ...], ...]  # for each GPU, the layers whose experts it holds
    gives_up: tuple[int, ...] = ()  # GPUs that cannot even hold the rest: the engine refuses to start


def fit_sizes(profile: Profile, settings: Settings, *, options: IkOptions = TODAY) -> FitSizes:
    """The engine's estimate; derived attention weights are counted five times too large, as it does."""
    table = {layer: tensors for layer, tensors in by_layer(profile).items() if layer < profile.layers}
    outside = {tensor.name: tensor.bytes for tensor in profile.tensors if tensor.layer is None}
    layers = [0] * profile.layers
    experts = [0] * profile.layers
    compute = 0
    for layer, tensors in table.items():
        row = kv_row_bytes(profile, settings, layer, tensors, options)
        derived, needed = _estimates(profile, settings, layer, tensors, options)
        layers[layer] = sum(t.bytes for t in tensors.values()) + derived + round(row * settings.cells)
        experts[layer] = sum(t.bytes for t in tensors.values() if t.cls is TensorClass.ROUTED_EXPERTS)
        compute = max(compute, needed)
    logits = (profile.vocabulary or 0) * settings.ubatch * F32
    head = outside.get("output.weight") or outside.get("token_embd.weight", 0)
    return FitSizes(tuple(layers), tuple(experts), head + max(0, logits - compute), compute)


def _estimates(
    profile: Profile, settings: Settings, layer: int, tensors: Mapping[str, Tensor], options: IkOptions
) -> tuple[int, int]:
    """Derived weights and compute buffer of one layer, as the engine reckons them."""
    compute = (_widest(profile, tensors) + 2 * (profile.embedding_length or 0)) * settings.ubatch * F32
    latent = latent_of(profile, tensors, layer)
    if latent is None:
        return 0, compute
    k_b, v_b, joined = (tensors.get(f"attn_{name}") for name in ("k_b", "v_b", "kv_b"))
    derived = 0
    if joined is None and k_b is not None and v_b is not None:
        row = BY_NAME[k_b.type if k_b.type in ("F16", "BF16", "F32") else "Q8_0"].tensor_bytes((latent.lora,))
        derived = row * (latent.v + k_b.shape[1]) * latent.heads * 2
    elif joined is not None:
        derived = (joined.bytes // 2) * ((k_b is None) + (v_b is None))
    if options.mla == 3 and v_b is not None:
        together = latent.heads_at_once(settings.cells, options.amb_mib)
        compute = max(compute, 2 * latent.v * together * settings.cells * F32)
    return derived, compute


def _widest(profile: Profile, tensors: Mapping[str, Tensor]) -> int:
    """Rows of up, gate and down together: of all chosen experts, of the shared one or of the dense ones."""
    used = profile.experts.used if profile.experts else 1
    widths = {"_exps": 0, "_shexp": 0, "": 0}
    for name, tensor in tensors.items():
        for suffix in widths:
            if name in (f"ffn_up{suffix}", f"ffn_gate{suffix}", f"ffn_down{suffix}", f"ffn_gate_up{suffix}"):
                widths[suffix] += tensor.shape[1] * (used if suffix == "_exps" else 1)
    return max(widths.values())


def free_at_start(total_bytes: int) -> int:
    """What `--fit` sees as free on an otherwise idle GPU of this size."""
    return max(0, total_bytes - BEFORE_FIT_BYTES)


def own_fit(
    sizes: FitSizes, free_bytes: Sequence[int], margins: Sequence[int] = (), *, options: IkOptions = TODAY
) -> OwnFit:
    """Divide a model over GPUs with so much free memory as `--fit --fit-margin` does."""
    count = len(free_bytes)
    each = list(margins) or [DEFAULT_MARGIN_BYTES]
    if not options.fit_margin_each or len(each) < count:
        each = each[:1] * count
    memory = [max(0, free - margin) for free, margin in zip(free_bytes, each[:count], strict=True)]
    needed = sum(sizes.layers) + sizes.head
    enough = needed <= sum(max(0, room - sizes.compute) for room in memory)
    if not enough and options.fit_counts_compute:
        memory = [max(0, room - sizes.compute) for room in memory]
    homes = _dealt(sizes, memory)
    if enough:
        return _kept(sizes, homes, [set() for _ in memory])
    if not any(sizes.experts):
        return _from_the_end(sizes, memory)
    gives_up = []
    dropped = [set[int]() for _ in memory]
    for gpu, room in enumerate(memory):
        mine = [item for item, home in enumerate(homes) if home == gpu]
        used = sum((*sizes.layers, sizes.head)[item] for item in mine)
        for layer in reversed([item for item in mine if item < len(sizes.layers)]):
            if used <= room:
                break
            used -= sizes.experts[layer]
            dropped[gpu].add(layer)
        if used > room:
            gives_up.append(gpu)
    return _kept(sizes, homes, dropped, tuple(gives_up))


def _dealt(sizes: FitSizes, memory: Sequence[int]) -> list[int]:
    """The GPU of each layer and, last, of the output: each takes its share of the whole, rounded to whole layers."""
    items = (*sizes.layers, sizes.head)
    count = len(memory)
    whole = sizes.compute * count + sum(items)
    total = sum(memory) or 1
    homes = [count - 1] * len(items)
    loaded = 0
    item = 0
    for gpu, share in enumerate(accumulate(memory)):
        loaded += sizes.compute
        end = whole * share / total
        while item < len(items) and loaded + items[item] <= end:
            homes[item], loaded, item = gpu, loaded + items[item], item + 1
        if item < len(items) and loaded + items[item] - end < end - loaded:
            homes[item], loaded, item = gpu, loaded + items[item], item + 1
    return homes


def _kept(sizes: FitSizes, homes: Sequence[int], dropped: Sequence[set[int]], gives_up: tuple[int, ...] = ()) -> OwnFit:
    held = tuple(
        tuple(layer for layer, size in enumerate(sizes.experts) if size and homes[layer] == gpu and layer not in gone)
        for gpu, gone in enumerate(dropped)
    )
    return OwnFit(tuple(homes[:-1]), homes[-1], held, gives_up)


def _from_the_end(sizes: FitSizes, memory: Sequence[int]) -> OwnFit:
    """A model without experts: the last GPU is filled first, what is left over at the front stays on the host."""
    items = (*sizes.layers, sizes.head)
    room = list(memory)
    homes: list[int | None] = [None] * len(items)
    gpu = len(room) - 1
    for item in reversed(range(len(items))):
        while gpu >= 0 and room[gpu] < items[item]:
            gpu -= 1
        if gpu < 0:
            break
        room[gpu] -= items[item]
        homes[item] = gpu
    head = homes[-1]
    gives_up = () if head is not None else tuple(range(len(room)))
    return OwnFit(tuple(homes[:-1]), len(room) - 1 if head is None else head, tuple(() for _ in room), gives_up)
