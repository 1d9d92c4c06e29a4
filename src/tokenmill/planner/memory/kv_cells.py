"""Number and size of the KV cells that llama.cpp allocates for a context, with its exact rounding.

           one cache for all sequences (unified)          a cache for each sequence
  full     the whole context, padded to 256               context / sequences, padded to 256, for each
  window   span x sequences + micro-batch, padded,        span + micro-batch, padded, for each
           never more than the full one                   never more than the full one

Recurrent layers have one state per sequence and, while tokens are drafted, one more per drafted token. Compressed ones
have a window and a cell per 4 or 128 tokens, always for each sequence, of as many tokens as the full cache.
Valid for llama.cpp since late 2025, which pads windows to 256 cells and stores only K of latent caches.
"""

from dataclasses import dataclass, replace

from tokenmill.model.profile import LayerCache, Profile
from tokenmill.model.tensor_types import BY_NAME
from tokenmill.planner.compute_graph.builder import F32, MicroBatch
from tokenmill.planner.plan import Settings

PAD = 256  # cells
CELL_TABLE_BYTES = 512  # 4096 sequences, a bit each
STREAM_TABLE_BYTES = 192 * 1024  # measured on a build for 4096 sequences

# keep snapshots of recurrent states; others compute rejected tokens again: llm_arch_supports_rs_rollback
_ROLLS_BACK = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
    }
)
_CACHES_PREDICTION = frozenset({"bailingmoe3"})  # cache prediction layers in the main context, too, without using them


@dataclass(frozen=True, slots=True)
class KvContext:
    """Parameters of one llama.cpp context."""

    tokens: int  # tokens per sequence
    sequences: int = 1
    ubatch: int = 512
    batch: int = 2048
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    unified: bool = True  # one cache for all sequences; --kv-unified
    full_windows: bool = False  # sliding windows keep the whole context; --swa-full
    total: int | None = None  # tokens of all sequences together; None: the full number for each
    outputs: int | None = None  # tokens of a batch with logits; None: all; llama-server: one per sequence
    state_ids: int | None = None  # sequence ids, each with a recurrent state, if there are more ids than sequences
    drafts: bool = False  # the context of the layers for multi-token prediction
    snapshots: int = 0  # recurrent states kept per sequence, in addition to the last, to take back drafted tokens

    @property
    def size(self) -> int:
        """Tokens of all sequences together (n_ctx)."""
        return self.tokens * self.sequences if self.total is None else self.total

    @property
    def ids(self) -> int:
        """Number of sequence ids (n_seq_max)."""
        return self.state_ids or self.sequences

    @property
    def streams(self) -> int:
        """Number of separate caches."""
        return 1 if self.unified else self.sequences

    @property
    def largest_batch(self) -> int:
        """Maximum tokens per call (n_batch)."""
        return min(self.size, self.batch)

    @property
    def largest_ubatch(self) -> int:
        """Maximum tokens per micro-batch (n_ubatch)."""
        return min(self.largest_batch, self.ubatch)


def context_of(settings: Settings, *, unified: bool = True, outputs: int | None = None) -> KvContext:
    """The llama.cpp context for a plan's settings; `unified=False` forces one cache per sequence."""
    return KvContext(
        tokens=settings.context,
        sequences=settings.sequences,
        ubatch=settings.ubatch,
        batch=settings.batch,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        unified=unified and settings.unified,
        full_windows=settings.full_windows,
        total=settings.total_cells,
        outputs=settings.output_rows if outputs is None else outputs,
        state_ids=settings.state_ids,
        snapshots=(settings.draft_tokens or 0) if settings.mtp else 0,
    )


def cells(context: int, sequences: int, ubatch: int, span: int | None, unified: bool, total: int | None = None) -> int:
    """Cells per stream in one layer; `context` is that of one sequence, `span` that of a sliding window.

    `total`: cells of all sequences, if they do not have the full context each.
    """
    together = _padded(context * sequences if total is None else total)
    full = together if unified else _padded(together // sequences)
    if span is None:
        return full
    return _padded(min(full, span * (sequences if unified else 1) + ubatch))


def kv_bytes(profile: Profile, context: KvContext) -> tuple[int, ...]:
    """Bytes of each layer's cache over all streams, including recurrent state."""
    # without flash attention V is stored transposed, with the same width in every layer
    widest = 0 if context.flash_attention else max((layer.v_elements for layer in profile.cache), default=0)
    if context.drafts:
        return tuple(_layer_bytes(layer, context, widest) for layer in profile.prediction)
    context = replace(context, snapshots=_snapshots(profile, context))
    sizes = [_layer_bytes(layer, context, widest) for layer in profile.cache]
    if profile.architecture in _CACHES_PREDICTION:
        sizes[-1] += sum(_layer_bytes(layer, context, widest) for layer in profile.prediction)
    return tuple(sizes)


def _snapshots(profile: Profile, context: KvContext) -> int:
    return context.snapshots if profile.architecture in _ROLLS_BACK else 0


def output_bytes(profile: Profile, context: KvContext) -> int:
    """Bytes of the host's logits buffer, which has one row per sequence."""
    return (profile.vocabulary or 0) * context.sequences * F32


def sequence_bytes(context: KvContext) -> int:
    """Bytes of the host's table of the sequences in each cell, in a library without the limit of 256 sequences."""
    if context.total is None:
        return 0
    streams = 0 if context.unified else context.sequences * STREAM_TABLE_BYTES
    return _padded(context.size) * CELL_TABLE_BYTES + streams


def largest_batch(profile: Profile, context: KvContext) -> MicroBatch:
    """The micro-batch for which compute buffers are reserved."""
    spans = [layer.span_tokens for layer in profile.cache if layer.span_tokens is not None]
    tokens = min(_padded(context.size), context.largest_ubatch)
    wanted = context.largest_batch if context.outputs is None else context.outputs
    return MicroBatch(
        tokens=-(-tokens // context.ids) * context.ids,
        cells=_layer_cells(LayerCache("full"), context),
        window_cells=_layer_cells(LayerCache("window", span_tokens=max(spans)), context) if spans else None,
        outputs=min(tokens, wanted),
        sequences=context.ids,
        snapshots=_snapshots(profile, context),
        flash_attention=context.flash_attention,
        cache_type_k=context.type_k,
        cache_type_v=context.type_v,
    )


def _layer_bytes(layer: LayerCache, context: KvContext, widest_v: int) -> int:
    if layer.kind == "none":
        return 0
    if layer.kind == "recurrent":
        return layer.state_bytes * context.ids * (1 + context.snapshots)
    if layer.kind == "compressed":
        return _compressed_bytes(layer, context)
    v_elements = 0 if layer.kind == "latent" else max(layer.v_elements, widest_v)
    row = (
        _row_bytes(context.type_k, layer.k_elements)
        + _row_bytes(context.type_v, v_elements)
        + _row_bytes(context.type_k, layer.indexer_elements)
    )
    return row * _layer_cells(layer, context) * context.streams


def _compressed_bytes(layer: LayerCache, context: KvContext) -> int:
    """Every sequence has a cache of its own, which is as large as the context of all of them if that is unified."""
    full = _layer_cells(LayerCache("full"), context)
    window = full if context.full_windows else _padded(min(full, (layer.span_tokens or 0) + context.largest_ubatch))
    compressed = _padded(-(-full // layer.compress_ratio)) if layer.compress_ratio else 0
    k_row = _row_bytes(context.type_k, layer.k_elements)
    cells = k_row * (window + compressed) + _row_bytes(context.type_k, layer.indexer_elements) * compressed
    return (cells + layer.state_bytes * (1 + context.snapshots)) * context.sequences


def _layer_cells(layer: LayerCache, context: KvContext) -> int:
    span = None if context.full_windows else layer.span_tokens
    return cells(context.tokens, context.sequences, context.largest_ubatch, span, context.unified, context.total)


def _row_bytes(cache_type: str, elements: int) -> int:
    return BY_NAME[cache_type.upper()].tensor_bytes((elements,)) if elements else 0


def _padded(count: int) -> int:
    return -(-count // PAD) * PAD
