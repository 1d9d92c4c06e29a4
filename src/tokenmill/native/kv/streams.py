"""Cells of their own for every lane: what that takes, and which models can.

    together    one cache of cells for all sequences; heads are shared. A new prompt lies where others have left room,
                in pieces, and its attention looks at every cell that lies between them.
    streams     as many caches as lanes. A prompt lies in one piece, and its attention meets nobody else; but a lane
                has only what its own last prompt began with, or a copy of what another lane has then, and prompts are
                not computed in one micro-batch with the tokens of answers.

Knows arithmetic and facts of models, no llama.cpp.
"""

from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.native.llama.settings import ContextSettings, ModelSettings

PAD = 256  # llama.cpp rounds the cells of a context, and those of each stream, up to whole ones
_LEAST_COPIED, _COPIED_SHARE = 16, 128  # tokens that a copy must save, and part of its stream's cells


def apart(settings: ContextSettings, lanes: int) -> ContextSettings:
    """The same context in streams, one for each lane: none holds fewer tokens than a sequence could have before.

    It never takes more cells than all lanes had together; UsageError where that is too few.
    """
    each = padded(settings.context)
    if lanes < 1:
        raise UsageError(f"{lanes} lanes compute nothing")
    if lanes * each > padded(settings.cells):
        raise UsageError(
            f"{lanes} lanes with {each} cells each do not fit into {settings.cells} cells",
            hint=f"{padded(settings.cells) // each} lanes do, or a shorter context",
        )
    return replace(settings, streams=True, sequences=lanes, cells=lanes * each)


def padded(cells: int) -> int:
    """Cells that llama.cpp makes of so many."""
    return -(-cells // PAD) * PAD


def least_copied(settings: ContextSettings) -> int:
    """Tokens that a copy of another lane's head must save: all of its stream is copied, and graphs are made anew."""
    return max(_LEAST_COPIED, settings.cells // settings.sequences // _COPIED_SHARE) if settings.streams else 1


def mixes(settings: ContextSettings, model: ModelSettings) -> bool:
    """Whether prompts and answers are better computed in one step.

    Streams llama.cpp computes apart anyway. On processors its attention takes 64 tokens of a batch together, and a cell
    that one of them sees is computed for all: with tokens of many answers among them, nearly all cells are. It does so
    with caches of 16 and 32 bits only. Cards skip what is masked; there, weights that are read once for both decide.
    """
    on_processors = not model.gpus or model.gpu_layers == 0
    kinds = {settings.cache_type_k, settings.cache_type_v}
    together = settings.flash_attention and kinds in ({"f16"}, {"f32"})
    return not settings.streams and not (on_processors and together)
