"""Memory cost of each part of a model under given settings; `draft` and `ledger` add them up.

KV is counted in whole cells. Compute buffers are computed from the graph of a few typical layers (`compute_graph`),
which is as large as that of all layers and much faster to replay. Depends on the engine, not on the machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.engines import TRAITS, EngineTraits
from tokenmill.planner.compute_graph.ik_llama import copies_experts
from tokenmill.planner.compute_graph.ik_memory import (
    ik_compute_bytes,
    ik_cpu_compute_bytes,
    ik_derived_bytes,
    ik_growth_bytes_per_token,
    ik_host_compute_bytes,
    ik_kv_bytes,
    ik_load_extra_bytes,
    ik_runtime_bytes,
)
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.compute_graph.llama_cpp import build_graph
from tokenmill.planner.memory.kv_cells import (
    KvContext,
    context_of,
    kv_bytes,
    largest_batch,
    output_bytes,
    sequence_bytes,
)
from tokenmill.planner.memory.weights import CONTEXT_BYTES, pool_bytes
from tokenmill.planner.plan import Settings

EXPERTS = TensorClass.ROUTED_EXPERTS


class MemoryCosts:
    """Costs in bytes. Immutable; results are cached."""

    def __init__(self, profile: Profile, settings: Settings) -> None:
        self.profile = profile
        self.settings = settings
        self.traits: EngineTraits = TRAITS[settings.engine]
        self.context: KvContext = context_of(settings)
        self.tensors: list[list[Tensor]] = [[] for _ in range(profile.layers)]
        for tensor in profile.tensors:
            if tensor.layer is not None and tensor.layer < profile.layers:
                self.tensors[tensor.layer].append(tensor)
        self.kv: tuple[int, ...] = self._kv()
        self._kinds = [self._kind(layer) for layer in range(profile.layers)]
        self._device = cache(self._device_bytes)

    def base(self, layer: int) -> int:
        """Bytes of a layer on the device that computes it, without its routed experts."""
        weights = sum(tensor.bytes for tensor in self.tensors[layer] if tensor.cls is not EXPERTS)
        return self.kv[layer] + weights + self.derived(layer) + self.expert_cache(1)

    def expert_cache(self, layers: int) -> int:
        """Bytes of the device cache for host experts, which is divided over the GPUs in proportion to their layers."""
        return -(-self.settings.moe_cache_bytes * layers // self.profile.layers) if self.profile.layers else 0

    def experts(self, layer: int) -> int:
        """Bytes of a layer's routed experts."""
        return sum(tensor.bytes for tensor in self.tensors[layer] if tensor.cls is EXPERTS)

    @property
    def head(self) -> int:
        """Bytes of the output weights; a tied output counts as a second copy of the embedding."""
        outside = [tensor for tensor in self.profile.tensors if tensor.layer is None]
        tied = self.profile.tied_output
        return sum(t.bytes for t in outside if t.cls is not TensorClass.EMBEDDING or tied)

    @property
    def prediction(self) -> int:
        """Bytes of the layers for multi-token prediction, if they draft tokens."""
        return sum(tensor.bytes for tensor in self.profile.of(TensorClass.MTP)) if self.settings.mtp else 0

    @property
    def moves_to_gpu(self) -> bool:
        """Whether a full micro-batch's products with host weights are computed on the GPU."""
        rows = self.traits.offload_rows
        return rows is not None and self.context.largest_ubatch >= rows

    def compute(self, layers: Sequence[int], *, head: bool) -> int:
        """Compute buffer of a GPU with these layers, without staging."""
        return self._device(self._typical(layers), False, head, False)

    def staging(self, layers: Sequence[int], *, head: bool, staged: Sequence[int]) -> int:
        """Bytes added to `compute` if the experts of `staged` layers are copied from the host."""
        if not any(self.experts(layer) for layer in staged) or not self.moves_to_gpu:
            return 0
        largest = max(
            staged, key=lambda layer: max((t.bytes for t in self.tensors[layer] if t.cls is EXPERTS), default=0)
        )
        typical = tuple(sorted({*self._typical(layers), largest}))
        return max(0, self._device(typical, False, head, True) - self.compute(layers, head=head))

    @property
    def lends_host_layers(self) -> bool:
        """Whether the first GPU computes large batches of the host's layers."""
        return self.moves_to_gpu

    def lent(self, layers: Sequence[int]) -> int:
        """Bytes on the first GPU for copies of the host layers' cache and, without experts, their largest matrix."""
        if not layers or not self.lends_host_layers:
            return 0
        # K and V of a latent cache are two views of one tensor, and both are copied
        twice = max(self.kv[layer] * (2 if self.profile.cache[layer].kind == "latent" else 1) for layer in layers)
        if any(self.experts(layer) for layer in layers):
            return twice
        return twice + max((tensor.bytes for layer in layers for tensor in self.tensors[layer]), default=0)

    def host_compute(self, layers: Sequence[int], *, head: bool) -> int:
        """Compute buffer in host memory; `layers` are those the CPU computes."""
        return self._device(self._typical(layers), True, head, False)

    @property
    def process(self) -> int:
        """Host memory of the engine process, including the logits of every sequence."""
        return self.traits.process_bytes + output_bytes(self.profile, self.context) + sequence_bytes(self.context)

    def derived(self, layer: int) -> int:
        """Bytes of weights that the engine derives while loading."""
        return 0

    def runtime(self, gpus: int, capability: str | None = None) -> int:
        """Driver context, kernels, workspaces and scratch on each of `gpus` GPUs of a compute capability."""
        return CONTEXT_BYTES.get(capability or "", self.traits.runtime_bytes) + pool_bytes(self.profile, self.context)

    def growth(self, layers: Sequence[int], tokens: int | None = None) -> int:
        """Bytes by which a GPU with these layers outgrows its buffers at `tokens` of context; None: full context."""
        return 0

    @property
    def load_extra(self) -> int:
        """Bytes of host memory used temporarily to rewrite tensors during the load."""
        return 0

    def _kv(self) -> tuple[int, ...]:
        sizes = kv_bytes(self.profile, self.context)
        if not self.traits.stores_latent_v:
            return sizes
        type_k = self.settings.cache_type_k
        type_v = self.settings.cache_type_v
        return tuple(
            round(layer.bytes_per_token(type_k, type_v, latent_v=True) * self.settings.cells)
            if layer.kind == "latent"
            else size
            for layer, size in zip(self.profile.cache, sizes, strict=True)
        )

    def _device_bytes(self, layers: tuple[int, ...], embed: bool, head: bool, staged: bool) -> int:
        old = self.traits.graph_of_2025
        found = largest_batch(self.profile, self.context)
        batch = replace(found, mixes_embeddings=not old, casts_mask=old, fuses=not (embed or old))
        graph = build_graph(self.profile, batch, layers, embed=embed, head=head, staged=layers if staged else ())
        return buffer_bytes(graph.steps)

    def _kind(self, layer: int) -> object:
        return self.profile.cache[layer], tuple((tensor.cls, tensor.shape) for tensor in self.tensors[layer])

    def _typical(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The first two layers of each kind and the model's edges; their buffer is as large as that of all layers.

        Layers with sparse attention are all typical, because each has a block that is allocated before the first layer.
        """
        if any(self.profile.cache[layer].indexer_top_k for layer in layers):
            return tuple(layers)
        kinds: dict[object, list[int]] = {}
        for layer in layers:
            kinds.setdefault(self._kinds[layer], []).append(layer)
        edges = {layer for layer in (0, self.profile.layers - 1) if layer in layers}
        return tuple(sorted(edges.union(*(same[:2] for same in kinds.values()))))


class IkCosts(MemoryCosts):
    """Costs of ik_llama.cpp, whose graphs and cache differ from llama.cpp's."""

    def __init__(self, profile: Profile, settings: Settings) -> None:
        self.options = settings.ik or TRAITS[settings.engine].ik or IkOptions()
        super().__init__(profile, settings)

    @property
    def moves_to_gpu(self) -> bool:
        """Whether a full micro-batch's products with host experts are computed on the GPU."""
        return copies_experts(self.profile, self.settings, self.options)

    @property
    def lends_host_layers(self) -> bool:
        """Unknown for ik_llama.cpp; the CPU is assumed to compute its own layers."""
        return False

    def derived(self, layer: int) -> int:
        """`attn_kv_b`, derived from its two halves."""
        return ik_derived_bytes(self.profile, (layer,), options=self.options)

    def runtime(self, gpus: int, capability: str | None = None) -> int:
        """Driver context and, with several GPUs, NCCL communicators; fitted to two reports."""
        return ik_runtime_bytes(gpus, options=self.options)

    def growth(self, layers: Sequence[int], tokens: int | None = None) -> int:
        """16-bit temporaries of cuBLAS, which grow with the context in use."""
        per_token = ik_growth_bytes_per_token(self.profile, self.settings, tuple(layers), options=self.options)
        cells = self.settings.cells
        return per_token * (cells if tokens is None else min(tokens, cells))

    @property
    def load_extra(self) -> int:
        """Bytes used temporarily while up and gate are merged."""
        return ik_load_extra_bytes(self.profile, options=self.options)

    def _kv(self) -> tuple[int, ...]:
        sizes = (
            ik_kv_bytes(self.profile, self.settings, (layer,), options=self.options)
            for layer in range(self.profile.layers)
        )
        return tuple(sizes)

    def _device_bytes(self, layers: tuple[int, ...], embed: bool, head: bool, staged: bool) -> int:
        if not embed:
            return ik_compute_bytes(
                self.profile,
                self.settings,
                layers,
                head=head,
                first=0 in layers,
                staged=layers if staged else (),
                options=self.options,
            )
        if layers:
            return ik_cpu_compute_bytes(self.profile, self.settings, options=self.options)
        return ik_host_compute_bytes(self.profile, self.settings, options=self.options)


def costs_of(profile: Profile, settings: Settings) -> MemoryCosts:
    """The costs for the engine that the settings name."""
    return IkCosts(profile, settings) if TRAITS[settings.engine].ik else MemoryCosts(profile, settings)
