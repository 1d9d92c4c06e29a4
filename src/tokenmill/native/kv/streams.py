"""Streams: a KV cache of its own for every slot, and when that is possible and faster.

    unified     one cache for all sequences; prefixes are shared. A new prompt fills gaps between other sequences, and
                its attention reads every cell between its first and its last.
    streams     one cache per slot. A prompt is contiguous, and its attention reads only its own cells; but a slot
                reuses only the beginning of its own last prompt or a copy of another slot's, and prompts are not
                computed in one micro-batch with answers.

Pure: arithmetic on settings.
"""

from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.native.llama.settings import ContextSettings, ModelSettings

PAD = 256  # llama.cpp rounds the cells of a context, and of each stream, up to a multiple of this
_LEAST_COPIED, _COPIED_SHARE = 16, 128  # tokens that a copy must save, and the divisor of its stream's cells


def apart(settings: ContextSettings, slots: int) -> ContextSettings:
    """The same context with one stream per slot, in which each sequence can be as long as before.

    It never takes more cells than the unified cache had; UsageError if these are too few.
    """
    each = padded(settings.context)
    if slots < 1:
        raise UsageError(f"the number of slots must be at least 1 (got {slots})")
    if slots * each > padded(settings.cells):
        raise UsageError(
            f"{slots} slots with {each} cells each do not fit into {settings.cells} cells",
            hint=f"use {padded(settings.cells) // each} slots, or a shorter context",
        )
    return replace(settings, streams=True, sequences=slots, cells=slots * each)


def padded(cells: int) -> int:
    """The number of cells that llama.cpp allocates for `cells`."""
    return -(-cells // PAD) * PAD


def least_copied(settings: ContextSettings) -> int:
    """Minimum tokens that copying another slot's prefix must save: it copies a whole stream and rebuilds the graphs."""
    return max(_LEAST_COPIED, settings.cells // settings.sequences // _COPIED_SHARE) if settings.streams else 1


def mixes(settings: ContextSettings, model: ModelSettings) -> bool:
    """Whether computing prompts and answers in one step is faster.

    llama.cpp always computes streams separately. On CPUs its flash attention processes 64 tokens of a batch together
    and reads a cell for all 64 if one of them needs it; with tokens of many answers among them, that is nearly all
    cells. It does so only with f16 and f32 caches. GPUs skip masked cells, and there reading the weights once for
    prompts and answers is faster.
    """
    on_cpus = not model.gpus or model.gpu_layers == 0
    kinds = {settings.cache_type_k, settings.cache_type_v}
    together = settings.flash_attention and kinds in ({"f16"}, {"f32"})
    return not settings.streams and not (on_cpus and together)
