"""Bytes that ik_llama.cpp allocates in addition to the file's weights: cache, buffers, runtime, growth.

Cache and buffers match the engine's log to the page. The memory of the CUDA runtime is fitted to the remainder that
nvidia-smi showed on two machines with RTX 3090.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.model.tensor_types import BY_NAME, cache_bytes
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.builder import F16, F32
from tokenmill.planner.compute_graph.ik_attention import MIN_EXPANDED_TOKENS, latent_of
from tokenmill.planner.compute_graph.ik_llama import build_cpu_graph, build_gpu_graph, build_host_graph, cells_of
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.compute_graph.layer_tensors import by_layer
from tokenmill.planner.plan import Settings
from tokenmill.units import MIB

TODAY = IkOptions()
HOST_ALIGNMENT = 32

# Context, kernels, cuBLAS: memory of three RTX 3090 in July 2025 (ik discussion 258), minus all buffers and the pool of
# 54 K tokens.
CONTEXT_BYTES = 470 * MIB
# NCCL communicators and everything else that grows with the number of GPUs: the remainder on eight RTX 3090 in March
# 2026, within 7 MiB on seven of them. llama.cpp's documentation mentions several hundred MB with two GPUs.
NCCL_PAIR_BYTES = 300 * MIB
NCCL_NEXT_BYTES = 116 * MIB
# An RTX 3090 of 24576 MiB reports 24124 MiB to CUDA, and less once a context is open, which is what --fit starts from.
DRIVER_BYTES = 452 * MIB
BEFORE_FIT_BYTES = DRIVER_BYTES + CONTEXT_BYTES


def ik_compute_bytes(
    profile: Profile,
    settings: Settings,
    layers: Sequence[int],
    *,
    head: bool,
    first: bool,
    staged: Sequence[int] = (),
    options: IkOptions = TODAY,
) -> int:
    """Compute buffer of a GPU that computes `layers`; the experts of `staged` layers live in host memory."""
    graph = build_gpu_graph(
        profile, settings, layers, head=head, first=first, staged=frozenset(staged), options=options
    )
    return buffer_bytes(graph.steps)


def ik_host_compute_bytes(
    profile: Profile, settings: Settings, *, hosted: bool = True, options: IkOptions = TODAY
) -> int:
    """Host compute buffer of a machine with GPUs; `hosted` when experts live in host memory."""
    return buffer_bytes(build_host_graph(profile, settings, hosted=hosted, options=options).steps, HOST_ALIGNMENT)


def ik_cpu_compute_bytes(profile: Profile, settings: Settings, *, options: IkOptions = TODAY) -> int:
    """Compute buffer of a machine without GPUs."""
    return buffer_bytes(build_cpu_graph(profile, settings, options).steps, HOST_ALIGNMENT)


def ik_kv_bytes(profile: Profile, settings: Settings, layers: Sequence[int], *, options: IkOptions = TODAY) -> int:
    """Cache bytes of the given layers; a latent cache stores only K and ignores the type of V."""
    table = by_layer(profile)
    return sum(
        round(kv_row_bytes(profile, settings, layer, table.get(layer, {}), options) * cells_of(settings))
        + profile.cache[layer].state_bytes * settings.sequences
        for layer in layers
    )


def kv_row_bytes(
    profile: Profile, settings: Settings, layer: int, tensors: Mapping[str, Tensor], options: IkOptions
) -> float:
    """Cache bytes of one token in one layer."""
    cache = profile.cache[layer]
    k = cache.k_elements
    v = cache.v_elements
    latent = latent_of(profile, tensors, layer)
    if latent is not None and options.mla == 0:
        k = latent.heads * (latent.nope + latent.rope)
        v = latent.heads * latent.v
    elif latent is not None and (settings.flash_attention or options.mla > 1):
        v = 0  # else the latent is stored a second time, transposed
    return cache_bytes(settings.cache_type_k, k) + cache_bytes(settings.cache_type_v, v) + cache.indexer_elements * F16


def ik_derived_bytes(profile: Profile, layers: Sequence[int], *, options: IkOptions = TODAY) -> int:
    """Bytes of weights that the engine derives from the file's, on the device of their layer.

    Files made with llama.cpp contain attn_k_b and attn_v_b; expanding K and V needs both joined as attn_kv_b, in Q8_0.
    Older files contain only attn_kv_b; attention in the latent space needs the two parts.
    """
    table = by_layer(profile)
    return sum(_derived_layer(profile, layer, table.get(layer, {}), options.mla) for layer in layers)


def _derived_layer(profile: Profile, layer: int, tensors: Mapping[str, Tensor], mla: int) -> int:
    latent = latent_of(profile, tensors, layer)
    if latent is None:
        return 0
    joined, k_b, v_b = (tensors.get(f"attn_{name}") for name in ("kv_b", "k_b", "v_b"))
    size = 0
    if joined is None and k_b is not None and v_b is not None and mla != 1:
        kind = k_b.type if k_b.type == v_b.type and k_b.type in ("F16", "BF16") else "Q8_0"
        size += BY_NAME[kind].tensor_bytes((latent.lora, latent.heads * latent.expanded))
    if joined is not None and mla > 0:
        size += 0 if k_b is not None else BY_NAME["Q8_0"].tensor_bytes((latent.nope, latent.lora * latent.heads))
        size += 0 if v_b is not None else joined.bytes * latent.v // latent.expanded
    return size


def ik_runtime_bytes(gpus: int, *, options: IkOptions = TODAY) -> int:
    """Bytes of the CUDA runtime and NCCL on each of `gpus` GPUs; measured for 3 and 8, interpolated between."""
    if gpus < 2 or not options.nccl:
        return CONTEXT_BYTES
    return CONTEXT_BYTES + NCCL_PAIR_BYTES + NCCL_NEXT_BYTES * (gpus - 2)


def ik_growth_bytes_per_token(
    profile: Profile, settings: Settings, layers: Sequence[int], *, options: IkOptions = TODAY
) -> int:
    """Bytes that each further token of context adds to a GPU's scratch pool, which never shrinks.

    Expanding K and V multiplies a weight with the cache. cuBLAS computes that in 16 bits, so the pool holds the product
    in 16 bits and two copies of the cache's rows, one of them in 16 bits. Attention with a quantized cache converts the
    cache first. The largest layer counts, because the layers run one after another.
    """
    table = by_layer(profile)
    return max((_growth_layer(profile, settings, layer, table.get(layer, {}), options) for layer in layers), default=0)


def _growth_layer(
    profile: Profile, settings: Settings, layer: int, tensors: Mapping[str, Tensor], options: IkOptions
) -> int:
    cache = profile.cache[layer]
    latent = latent_of(profile, tensors, layer)
    plain_k = settings.cache_type_k == "f16"
    plain_v = settings.cache_type_v == "f16"
    if latent is None or options.mla == 0:
        return (0 if plain_k else cache.k_elements * F16) + (0 if plain_v else cache.v_elements * F16)
    straight = 0 if plain_k else (cache.k_elements + cache.v_elements) * F16
    if options.mla == 1 or not settings.flash_attention or settings.ubatch < MIN_EXPANDED_TOKENS:
        return straight
    rows = latent.heads_per_group(cells_of(settings), options.amb_mib) * latent.expanded
    return max(straight, rows * F16 + latent.lora * (F32 + (0 if plain_k else F16)))


def ik_load_extra_bytes(profile: Profile, *, options: IkOptions = TODAY) -> int:
    """Bytes of host memory used temporarily by `-muge`, which copies up and gate of a layer and joins them."""
    if not options.muge:
        return 0
    pairs = [
        sum(tensors[name].bytes for name in ("ffn_up_exps", "ffn_gate_exps"))
        for tensors in by_layer(profile).values()
        if "ffn_up_exps" in tensors and "ffn_gate_exps" in tensors
    ]
    return 2 * max(pairs, default=0)


DEFAULT_MARGIN_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True)
class FitSizes:
    """Sizes in bytes as the engine estimates and prints them before loading."""

    layers: tuple[int, ...]  # weights, derived weights and cache
    experts: tuple[int, ...]  # the part of `layers` that can go to host memory
    head: int
    compute: int  # compute buffer of every GPU


@dataclass(frozen=True, slots=True)
class OwnFit:
    """The placement that the engine's `--fit` chooses."""

    layers: tuple[int | None, ...]  # GPU of each layer; None: the CPU
    head: int  # GPU of the output
    experts: tuple[tuple[int, ...], ...]  # per GPU, the layers whose experts it holds
    too_small: tuple[int, ...] = ()  # GPUs that cannot hold their layers even without experts; the engine then exits


def fit_sizes(profile: Profile, settings: Settings, *, options: IkOptions = TODAY) -> FitSizes:
    """The engine's estimates, in which derived attention weights are five times too large."""
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
    """Derived weights and compute buffer of one layer, as the engine estimates them."""
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
        together = latent.heads_per_group(settings.cells, options.amb_mib)
        compute = max(compute, 2 * latent.v * together * settings.cells * F32)
    return derived, compute


def _widest(profile: Profile, tensors: Mapping[str, Tensor]) -> int:
    """Sum of the rows of up, gate and down: the largest of all chosen experts, the shared expert or the dense layer."""
    used = profile.experts.used if profile.experts else 1
    widths = {"_exps": 0, "_shexp": 0, "": 0}
    for name, tensor in tensors.items():
        for suffix in widths:
            if name in (f"ffn_up{suffix}", f"ffn_gate{suffix}", f"ffn_down{suffix}", f"ffn_gate_up{suffix}"):
                widths[suffix] += tensor.shape[1] * (used if suffix == "_exps" else 1)
    return max(widths.values())


def free_at_start(total_bytes: int) -> int:
    """Bytes that `--fit` sees as free on an otherwise idle GPU of this size."""
    return max(0, total_bytes - BEFORE_FIT_BYTES)


def own_fit(
    sizes: FitSizes, free_bytes: Sequence[int], margins: Sequence[int] = (), *, options: IkOptions = TODAY
) -> OwnFit:
    """Divide a model over GPUs with `free_bytes` of memory as `--fit --fit-margin` does."""
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
    too_small = []
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
            too_small.append(gpu)
    return _kept(sizes, homes, dropped, tuple(too_small))


def _dealt(sizes: FitSizes, memory: Sequence[int]) -> list[int]:
    """The GPU of each layer and, last, of the output; each GPU's share is rounded to whole layers."""
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


def _kept(
    sizes: FitSizes, homes: Sequence[int], dropped: Sequence[set[int]], too_small: tuple[int, ...] = ()
) -> OwnFit:
    held = tuple(
        tuple(layer for layer, size in enumerate(sizes.experts) if size and homes[layer] == gpu and layer not in gone)
        for gpu, gone in enumerate(dropped)
    )
    return OwnFit(tuple(homes[:-1]), homes[-1], held, too_small)


def _from_the_end(sizes: FitSizes, memory: Sequence[int]) -> OwnFit:
    """Placement of a model without experts: GPUs are filled from the last, the first layers may stay on the host."""
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
    too_small = () if head is not None else tuple(range(len(room)))
    return OwnFit(tuple(homes[:-1]), len(room) - 1 if head is None else head, tuple(() for _ in room), too_small)
