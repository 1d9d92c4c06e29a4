"""A model as one frozen `Profile`: tensors, layers, KV layout and tokenizer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from tokenmill.model.tensor_types import CACHE_TYPES, cache_bytes


class TensorClass(StrEnum):
    """The purpose of a tensor; the planner places whole classes."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"  # and its replacements: state-space, linear and convolution mixers
    DENSE_FFN = "dense_ffn"
    ROUTER = "router"
    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    NORM = "norm"
    OUTPUT = "output"
    MTP = "mtp"  # multi-token prediction layers, which ordinary decoding does not use
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table."""

    name: str
    cls: TensorClass
    layer: int | None  # None: outside the layers
    shape: tuple[int, ...]  # fastest dimension first, as in GGUF
    type: str  # Q4_K, F32, F8_E4M3, ...
    bytes: int
    elements: int  # number of parameters; packed types store several in one number
    file: int = 0  # index into Profile.files
    offset: int = 0  # from the start of that file

    @property
    def experts(self) -> int | None:
        """Number of experts in a routed tensor; None for other tensors."""
        return self.shape[-1] if self.cls is TensorClass.ROUTED_EXPERTS and len(self.shape) == 3 else None


@dataclass(frozen=True, slots=True)
class Experts:
    """Number of experts, and of experts used per token."""

    count: int
    used: int
    shared: int | None = None

    def distinct(self, tokens: int) -> float:
        """Expected number of different experts that `tokens` tokens touch in one layer, routed evenly."""
        return self.count * (1.0 - (1.0 - self.used / self.count) ** tokens)


TOKEN_EMBEDDINGS = ("token_embd.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Name suffixes of the embedding table, which is also the output matrix of models without one."""

CacheKind = Literal["full", "latent", "window", "chunked", "compressed", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache of one layer per token of context, in elements; bytes depend on the cache type.

    latent: K is the compressed state and V a view of it; only older llama.cpp versions also store `v_elements`.
    window, chunked: attention spans at most `span_tokens`, so an engine can drop older tokens.
    compressed: K (V is a view of it) and index keys of one cell for `compress_ratio` tokens, those of the last
    `span_tokens` tokens, and `state_bytes` per sequence of the tokens that are not compressed yet; ratio 0: no cells.
    recurrent: `state_bytes` per sequence of any length.
    """

    kind: CacheKind
    k_elements: int = 0
    v_elements: int = 0
    span_tokens: int | None = None
    state_bytes: int = 0
    indexer_elements: int = 0  # sparse-attention index keys, in addition to K
    compress_ratio: int = 0
    indexer_top_k: int = 0  # tokens that sparse attention chooses for a query; 0: all

    def bytes_per_token(self, type_k: str = "f16", type_v: str = "f16", *, latent_v: bool = False) -> float:
        """Bytes per token of context; `latent_v` is True for engines that store V of a latent cache separately."""
        v_elements = 0 if self.kind == "latent" and not latent_v else self.v_elements
        if self.compress_ratio:
            return cache_bytes(type_k, self.k_elements + self.indexer_elements) / self.compress_ratio
        return cache_bytes(type_k, self.k_elements + self.indexer_elements) + cache_bytes(type_v, v_elements)

    def tokens_kept(self, context: float) -> float:
        """Tokens kept of a sequence of `context` tokens by an engine that drops those outside the span."""
        unlimited = self.span_tokens is None or self.compress_ratio
        return context if unlimited else min(context, self.span_tokens or 0)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Tokenizer data in the file."""

    model: str | None = None  # gpt2, llama, ...
    pre: str | None = None
    tokens: int | None = None
    chat_template: bool = False


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of the model."""

    path: str  # a path or a URL
    bytes: int


ModelFormat = Literal["gguf", "safetensors", "catalog"]


@dataclass(frozen=True, slots=True)
class Profile:
    """All facts about one model."""

    name: str
    format: ModelFormat
    architecture: str
    tensors: tuple[Tensor, ...]
    files: tuple[ModelFile, ...]
    layers: int
    cache: tuple[LayerCache, ...]  # one per decoding layer, without multi-token-prediction layers
    experts: Experts | None = None
    embedding_length: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    training_context: int | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    quantisation: str | None = None  # common name: Q4_K_M, nvfp4; see by_type() for the actual mix
    ghost: bool = False  # a real header without weights
    guesses: tuple[str, ...] = ()  # assumptions, as sentences
    prediction: tuple[LayerCache, ...] = ()  # one per multi-token-prediction layer

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Number of parameters, including embeddings and multi-token prediction."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all parameters, as llama.cpp prints it."""
        return 8 * self.bytes / self.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters read per token, with the share of experts and the embedding row that a token uses."""
        return round(self._read(lambda tensor: tensor.elements, 1))

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary: rows of the output matrix, else the number of tokens in the file."""
        for cls in (TensorClass.OUTPUT, TensorClass.EMBEDDING):
            for tensor in self.of(cls):
                if len(tensor.shape) == 2:
                    return max(tensor.shape)
        return self.tokenizer.tokens

    @property
    def tied_output(self) -> bool:
        """Whether the embedding table also serves as the output matrix."""
        return not any(tensor.cls is TensorClass.OUTPUT and len(tensor.shape) > 1 for tensor in self.tensors)

    def by_class(self) -> dict[TensorClass, int]:
        """Bytes of each class, without empty ones, in the enum's order."""
        return {cls: sum(t.bytes for t in self.of(cls)) for cls in TensorClass if any(self.of(cls))}

    def by_layer(self) -> dict[int | None, dict[TensorClass, int]]:
        """Bytes of each class per layer; None for tensors outside the layers."""
        table: dict[int | None, dict[TensorClass, int]] = {}
        for tensor in self.tensors:
            row = table.setdefault(tensor.layer, {})
            row[tensor.cls] = row.get(tensor.cls, 0) + tensor.bytes
        return table

    def by_type(self) -> dict[str, int]:
        """Bytes of each tensor type, largest first: the actual quantization mix."""
        mix: dict[str, int] = {}
        for tensor in self.tensors:
            mix[tensor.type] = mix.get(tensor.type, 0) + tensor.bytes
        return dict(sorted(mix.items(), key=lambda item: -item[1]))

    def of(self, *classes: TensorClass) -> Iterable[Tensor]:
        """Tensors of these classes, in file order."""
        return (tensor for tensor in self.tensors if tensor.cls in classes)

    def read_bytes(self, sequences: int = 1, *classes: TensorClass) -> float:
        """Weight bytes read by one step that decodes `sequences` sequences; with `classes`, only theirs."""
        return self._read(lambda tensor: tensor.bytes if not classes or tensor.cls in classes else 0, sequences)

    def kv_bytes_per_token(self) -> dict[str, dict[str, float]]:
        """Cache bytes of one token in all layers by cache type, without and with a separate V of latent caches."""
        return {
            name: {
                "per_token": sum(layer.bytes_per_token(name, name) for layer in self.cache),
                "per_token_if_latent_v_is_stored": sum(
                    layer.bytes_per_token(name, name, latent_v=True) for layer in self.cache
                ),
            }
            for name in CACHE_TYPES
        }

    def cache_bytes(self, context: int, type_k: str = "f16", type_v: str = "f16", *, latent_v: bool = False) -> int:
        """Minimum cache bytes of one sequence of `context` tokens, including recurrent state.

        Engines need more, because they round up and may keep windows in full; see `planner.memory.kv_cells`.
        """
        return round(
            sum(
                layer.bytes_per_token(type_k, type_v, latent_v=latent_v) * layer.tokens_kept(context)
                + layer.state_bytes
                for layer in self.cache
            )
        )

    def _read(self, weight: Callable[[Tensor], int], tokens: int) -> float:
        share = self.experts.distinct(tokens) / self.experts.count if self.experts else 1.0
        tied = self.tied_output  # computed once, because it iterates over all tensors
        total = 0.0
        for tensor in self.tensors:
            if tensor.cls is TensorClass.ROUTED_EXPERTS:
                total += weight(tensor) * share
            elif tensor.cls is TensorClass.EMBEDDING:
                rows = tensor.shape[-1] if len(tensor.shape) > 1 else 1
                whole = tied and tensor.name.endswith(TOKEN_EMBEDDINGS)
                total += weight(tensor) * (1.0 if whole else min(1.0, tokens / rows))
            elif tensor.cls is TensorClass.OTHER and tensor.layer is None:
                continue  # vision towers and rope tables are not read for every token
            elif tensor.cls is not TensorClass.MTP:
                total += weight(tensor)
        return total
