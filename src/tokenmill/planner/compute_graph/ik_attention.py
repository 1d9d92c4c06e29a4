"""Attention as ik_llama.cpp computes it. Latent attention with `-mla 3` needs the most memory.

For a prompt, K and V are expanded from the latent cache for one group of attention heads after another:

  cache -> both (K without rope, and V; 32 bit) -> k_nope, v (16 bit) -> k (with rope) -> attended -> next group

`-amb` limits the size of `both` and thereby of all the others. Single tokens are computed in the latent space and need
little memory. Follows src/graphs/build_deepseek2.cpp of 2026, or the order of 2025 if the options select it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill.model.profile import LayerCache, Profile, Tensor
from tokenmill.model.tensor_types import cache_bytes
from tokenmill.planner.compute_graph.builder import F16, F32, GraphBuilder
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.units import MIB

MIN_EXPANDED_TOKENS = 128  # batch size from which K and V are expanded


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention, in elements."""

    heads: int
    nope: int  # of K, without the rotated part
    rope: int
    v: int
    lora: int

    @property
    def expanded(self) -> int:
        """Elements of K (without rope) and V of one attention head."""
        return self.nope + self.v

    def heads_per_group(self, cells: int, amb_mib: int) -> int:
        """Attention heads expanded together: the largest equal group whose 32-bit result fits `-amb`, at least one."""
        whole_mib = self.heads * self.expanded * cells * F32 // MIB
        if amb_mib <= 0 or whole_mib <= amb_mib:
            return self.heads
        rounds = (n for n in range(2, self.heads) if self.heads % n == 0 and whole_mib // n <= amb_mib)
        return self.heads // next(rounds, self.heads)


def latent_of(profile: Profile, tensors: Mapping[str, Tensor], layer: int) -> Latent | None:
    """Sizes of one layer's latent attention; None if the layer has ordinary attention."""
    cache = profile.cache[layer]
    heads = profile.heads or 1
    if cache.kind != "latent":
        return None
    lora = cache.v_elements
    rope = cache.k_elements - cache.v_elements
    query = tensors["attn_q_b"] if "attn_q_b" in tensors else tensors["attn_q"]
    return Latent(heads, query.shape[1] // heads - rope, rope, tensors["attn_output"].shape[0] // heads, lora)


@dataclass(slots=True)
class Attention:
    """Builds attention on one device; every method appends to the graph."""

    graph: GraphBuilder
    options: IkOptions
    cells: int
    cache_type: str  # of K
    flash: bool
    gpu: bool  # False: expanded tensors keep the cache's type
    positions: int
    mask: int  # as created, before any cast
    half_mask_bytes: int
    convert_mask: bool
    heads: int
    _converted: list[int] = field(default_factory=list)

    def expands(self) -> bool:
        """Whether this batch is large enough that K and V are expanded."""
        return self.options.mla > 1 and self.flash and self.graph.tokens >= MIN_EXPANDED_TOKENS

    def ordinary(self, cache: LayerCache, width: int, normed: int) -> int:
        """Ordinary attention; each token has `width` elements of query."""
        graph = self.graph
        q, k, v = (graph.add("qkv", size, normed) for size in (width, cache.k_elements, cache.v_elements))
        q = graph.add("q", width, q, self.positions, in_place=True)
        k = graph.add("k", cache.k_elements, k, self.positions, in_place=True)
        graph.store(graph.view(k))
        graph.store(v)
        if self.flash:
            return graph.view(graph.add("attended", width, graph.view(q), self._mask()))
        return graph.add("attended", width, graph.view(graph.add("kqv", width, self._scores(graph.view(q)))))

    def latent(self, sizes: Latent, rank: int, normed: int) -> int:
        """Latent attention; `rank` is that of compressed queries, or 0 if they are not compressed."""
        query, rotated = self._query(sizes, rank, normed)
        return self._expanded(sizes, query, rotated) if self.expands() else self._absorbed(sizes, query, rotated)

    def _query(self, sizes: Latent, rank: int, normed: int) -> tuple[int, int]:
        """Queries and their rotated part. Some versions store the token's own cache row before them, others after."""
        graph = self.graph
        width = sizes.heads * (sizes.nope + sizes.rope)
        if not self.options.by_groups:
            self._store(sizes, graph.add("kv_a", sizes.lora + sizes.rope, normed))
        query = graph.add("q_a", rank, normed) if rank else normed
        row = graph.add("kv_a", sizes.lora + sizes.rope, normed) if self.options.by_groups else None
        query = graph.add("q_a", rank, query) if rank else query
        query = graph.add("q", width, query)
        rotated = graph.add("q_rope", sizes.heads * sizes.rope, graph.view(query), self.positions)
        if row is not None:
            self._store(sizes, row)
        return query, rotated

    def _store(self, sizes: Latent, row: int) -> None:
        graph = self.graph
        rope = graph.add("k_rope", sizes.rope, graph.view(row), self.positions)
        lora = graph.add("kv_norm", sizes.lora, graph.view(row))
        graph.store(graph.add("kvr", sizes.lora + sizes.rope, graph.view(rope), lora))

    def _expanded(self, sizes: Latent, query: int, rotated: int) -> int:
        graph = self.graph
        cells = self.cells
        joined = graph.add("q", sizes.heads * (sizes.nope + sizes.rope), rotated, graph.view(query))
        queries = graph.view(joined)
        together = sizes.heads_per_group(cells, self.options.amb_mib)
        done: list[int] = []
        waiting: list[tuple[int, int]] = []
        ropes: int | None = None
        for _ in range(sizes.heads // together):
            both = graph.block("both", together * sizes.expanded * cells * F32)
            k_nope = graph.block("k_nope", self._kept(together * sizes.nope), graph.view(both))
            v = graph.block("v", self._kept(together * sizes.v), graph.view(both))
            ropes = self._ropes(sizes, together) if ropes is None else ropes
            waiting.append((graph.block("k", self._kept(together * (sizes.nope + sizes.rope)), ropes, k_nope), v))
            if self.options.by_groups:
                self._attend(queries, waiting.pop(), together * sizes.v, done)
        for pair in waiting:
            self._attend(queries, pair, together * sizes.v, done)
        return done[-1]

    def _ropes(self, sizes: Latent, together: int) -> int:
        """The rotated part, which all attention heads share, repeated for each."""
        plain = not self.gpu or self.cache_type == "f16"
        half = () if plain else (self.graph.block("rope", sizes.rope * self.cells * F16),)
        return self.graph.block("ropes", self._kept(together * sizes.rope), *half)

    def _attend(self, queries: int, pair: tuple[int, int], width: int, done: list[int]) -> None:
        """Attend with one group of attention heads and append the result to `done` in a new buffer."""
        graph = self.graph
        result = graph.view(graph.add("kqv", width, graph.view(queries), *pair, self._mask()))
        done.append(graph.add("heads", (len(done) + 1) * width, done[-1], result) if done else result)

    def _absorbed(self, sizes: Latent, query: int, rotated: int) -> int:
        """Project queries into the latent space, attend there, and project the result back."""
        graph = self.graph
        heads = sizes.heads
        taken = graph.add("q_nope", heads * sizes.lora, graph.view(query))
        joined = graph.add("q", heads * (sizes.lora + sizes.rope), graph.view(rotated), taken)
        if self.flash:
            result = graph.add("latent", heads * sizes.lora, joined, self._mask())
        else:
            result = graph.add("latent", heads * sizes.lora, self._scores(joined))
        values = graph.add("kqv", heads * sizes.v, graph.view(result))
        return graph.view(graph.add("kqv", heads * sizes.v, graph.view(values)))

    def _scores(self, query: int) -> int:
        """Scores without flash attention: every token against every cell, in parts of at most `-amb`."""
        size = self.heads * self.cells * self.graph.tokens * F32
        size = min(size, self.options.amb_mib * MIB) if self.options.amb_mib else size
        return self.graph.block("soft", size, self.graph.block("kq", size, query), self._mask())

    def _kept(self, per_cell: int) -> int:
        """Bytes of expanded K or V: 16 bits, or the cache's own type without a GPU."""
        return self.cells * (per_cell * F16 if self.gpu else round(cache_bytes(self.cache_type, per_cell)))

    def _mask(self) -> int:
        """The mask as flash attention reads it; a 32-bit mask is converted on first use."""
        if not self.convert_mask:
            return self.mask
        if not self._converted:
            self._converted.append(self.graph.block("mask", self.half_mask_bytes, self.mask))
        return self._converted[0]
