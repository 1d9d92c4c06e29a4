"""Attention as ik_llama.cpp computes it. What takes memory is the latent kind with `-mla 3`.

A prompt is attended to with K and V in full, expanded out of the latent cache for some heads at a time:

  cache -> both (K without rope, and V; 32 bit) -> k_nope, v (16 bit) -> k (with rope) -> attended -> next heads

`-amb` bounds `both`, and everything beside it follows. Single tokens stay in the latent space and need little.
Drawn after src/graphs/build_deepseek2.cpp of 2026, and in the order of 2025 where the options say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill.model.profile import LayerCache, Profile, Tensor
from tokenmill.model.tensor_types import cache_bytes
from tokenmill.planner.compute_graph.builder import F16, F32, GraphBuilder
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.units import MIB

LEAST_PROMPT = 128  # tokens from which on K and V are expanded


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
        """K without rope, and V, of one head."""
        return self.nope + self.v

    def heads_at_once(self, cells: int, amb_mib: int) -> int:
        """Heads expanded together: the largest equal share whose 32-bit result stays within `-amb`, or one."""
        whole_mib = self.heads * self.expanded * cells * F32 // MIB
        if amb_mib <= 0 or whole_mib <= amb_mib:
            return self.heads
        rounds = (n for n in range(2, self.heads) if self.heads % n == 0 and whole_mib // n <= amb_mib)
        return self.heads // next(rounds, self.heads)


def latent_of(profile: Profile, tensors: Mapping[str, Tensor], layer: int) -> Latent | None:
    """Sizes of one layer's latent attention; None where it is ordinary."""
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
    """Attention being drawn on one device; every method adds to the sketch."""

    sketch: GraphBuilder
    options: IkOptions
    cells: int
    cache_type: str  # of K
    flash: bool
    gpu: bool  # without one, what is expanded keeps the cache's type
    positions: int
    mask: int  # as it came in
    half_mask_bytes: int
    convert_mask: bool
    heads: int
    _converted: list[int] = field(default_factory=list)

    def expands(self) -> bool:
        """Whether a batch of this size expands K and V."""
        return self.options.mla > 1 and self.flash and self.sketch.tokens >= LEAST_PROMPT

    def ordinary(self, cache: LayerCache, width: int, normed: int) -> int:
        """K and V as they are; `width` elements of query for each token."""
        sketch = self.sketch
        q, k, v = (sketch.add("qkv", size, normed) for size in (width, cache.k_elements, cache.v_elements))
        q = sketch.add("q", width, q, self.positions, in_place=True)
        k = sketch.add("k", cache.k_elements, k, self.positions, in_place=True)
        sketch.store(sketch.view(k))
        sketch.store(v)
        if self.flash:
            return sketch.view(sketch.add("attended", width, sketch.view(q), self._mask()))
        return sketch.add("attended", width, sketch.view(sketch.add("kqv", width, self._scores(sketch.view(q)))))

    def latent(self, sizes: Latent, rank: int, normed: int) -> int:
        """Through the latent cache; `rank` is that of compressed queries, 0 for none."""
        query, rotated = self._query(sizes, rank, normed)
        return self._expanded(sizes, query, rotated) if self.expands() else self._absorbed(sizes, query, rotated)

    def _query(self, sizes: Latent, rank: int, normed: int) -> tuple[int, int]:
        """Queries and their rotated part; the token's own row goes into the cache before or after."""
        sketch = self.sketch
        width = sizes.heads * (sizes.nope + sizes.rope)
        if not self.options.by_groups:
            self._store(sizes, sketch.add("kv_a", sizes.lora + sizes.rope, normed))
        query = sketch.add("q_a", rank, normed) if rank else normed
        row = sketch.add("kv_a", sizes.lora + sizes.rope, normed) if self.options.by_groups else None
        query = sketch.add("q_a", rank, query) if rank else query
        query = sketch.add("q", width, query)
        rotated = sketch.add("q_rope", sizes.heads * sizes.rope, sketch.view(query), self.positions)
        if row is not None:
            self._store(sizes, row)
        return query, rotated

    def _store(self, sizes: Latent, row: int) -> None:
        sketch = self.sketch
        rope = sketch.add("k_rope", sizes.rope, sketch.view(row), self.positions)
        lora = sketch.add("kv_norm", sizes.lora, sketch.view(row))
        sketch.store(sketch.add("kvr", sizes.lora + sizes.rope, sketch.view(rope), lora))

    def _expanded(self, sizes: Latent, query: int, rotated: int) -> int:
        sketch = self.sketch
        cells = self.cells
        joined = sketch.add("q", sizes.heads * (sizes.nope + sizes.rope), rotated, sketch.view(query))
        queries = sketch.view(joined)
        together = sizes.heads_at_once(cells, self.options.amb_mib)
        done: list[int] = []
        waiting: list[tuple[int, int]] = []
        ropes: int | None = None
        for _ in range(sizes.heads // together):
            both = sketch.block("both", together * sizes.expanded * cells * F32)
            k_nope = sketch.block("k_nope", self._kept(together * sizes.nope), sketch.view(both))
            v = sketch.block("v", self._kept(together * sizes.v), sketch.view(both))
            ropes = self._ropes(sizes, together) if ropes is None else ropes
            waiting.append((sketch.block("k", self._kept(together * (sizes.nope + sizes.rope)), ropes, k_nope), v))
            if self.options.by_groups:
                self._attend(queries, waiting.pop(), together * sizes.v, done)
        for pair in waiting:
            self._attend(queries, pair, together * sizes.v, done)
        return done[-1]

    def _ropes(self, sizes: Latent, together: int) -> int:
        """The rotated part, the same for every head, once for each."""
        plain = not self.gpu or self.cache_type == "f16"
        half = () if plain else (self.sketch.block("rope", sizes.rope * self.cells * F16),)
        return self.sketch.block("ropes", self._kept(together * sizes.rope), *half)

    def _attend(self, queries: int, pair: tuple[int, int], width: int, done: list[int]) -> None:
        """Attend to one group of heads and put the result behind those `done`, in a new place."""
        sketch = self.sketch
        result = sketch.view(sketch.add("kqv", width, sketch.view(queries), *pair, self._mask()))
        done.append(sketch.add("heads", (len(done) + 1) * width, done[-1], result) if done else result)

    def _absorbed(self, sizes: Latent, query: int, rotated: int) -> int:
        """Queries are taken into the latent space, and the result out of it."""
        sketch = self.sketch
        heads = sizes.heads
        taken = sketch.add("q_nope", heads * sizes.lora, sketch.view(query))
        joined = sketch.add("q", heads * (sizes.lora + sizes.rope), sketch.view(rotated), taken)
        if self.flash:
            result = sketch.add("latent", heads * sizes.lora, joined, self._mask())
        else:
            result = sketch.add("latent", heads * sizes.lora, self._scores(joined))
        values = sketch.add("kqv", heads * sizes.v, sketch.view(result))
        return sketch.view(sketch.add("kqv", heads * sizes.v, sketch.view(values)))

    def _scores(self, query: int) -> int:
        """Without flash attention: every token against every cell, in parts no larger than `-amb`."""
        size = self.heads * self.cells * self.sketch.tokens * F32
        size = min(size, self.options.amb_mib * MIB) if self.options.amb_mib else size
        return self.sketch.block("soft", size, self.sketch.block("kq", size, query), self._mask())

    def _kept(self, per_cell: int) -> int:
        """Bytes of expanded K or V: 16 bits, or the cache's own type where no GPU is in use."""
        return self.cells * (per_cell * F16 if self.gpu else round(cache_bytes(self.cache_type, per_cell)))

    def _mask(self) -> int:
        """The mask as flash attention reads it; made in 32 bits, it is converted when it is first needed."""
        if not self.convert_mask:
            return self.mask
        if not self._converted:
            self._converted.append(self.sketch.block("mask", self.half_mask_bytes, self.mask))
        return self._converted[0]
