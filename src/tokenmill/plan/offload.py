"""From how many rows llama.cpp moves products with host experts to a GPU, and when a plan moves that point.

The experts cross PCIe each time. In prefill that pays; in decoding, where every sequence is a row, 32 sequences were
measured five times slower than 16. GGML_OP_OFFLOAD_MIN_BATCH is read when the engine starts, and holds for both.
"""

from tokenmill.model.profile import Profile, TensorClass
from tokenmill.plan.plan import Placement, Settings
from tokenmill.plan.traits import TRAITS

LEAST_ROWS = 128  # a threshold that is set is never lower, so that some more sequences do not reach it


def set_rows(profile: Profile, settings: Settings, placement: Placement, asked: int | None = None) -> int | None:
    """The variable's value under a plan; None: the engine's own threshold stays, or nothing ever moves.

    What is `asked` for is taken; else it is set where decoding all sequences would reach the engine's own.
    """
    own = _own_rows(profile, settings, placement)
    if own is None or asked is not None:
        return None if own is None else asked
    return None if settings.sequences < own else max(LEAST_ROWS, 1 << settings.sequences.bit_length())


def rows_in_force(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The threshold that an engine with these settings has, whoever set it; None: nothing ever moves."""
    own = _own_rows(profile, settings, placement)
    return own if own is None or settings.offload_min_batch is None else settings.offload_min_batch


def _own_rows(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The engine's own threshold; None where it knows no such variable or no GPU computes beside host experts."""
    traits = TRAITS[settings.engine]
    if traits.ik is not None or not placement.gpus:
        return None
    homes = zip(profile.tensors, placement.homes, strict=True)
    on_host = any(tensor.cls is TensorClass.ROUTED_EXPERTS and not home.startswith("gpu") for tensor, home in homes)
    return traits.offload_rows if on_host else None
