"""Chooses GGML_OP_OFFLOAD_MIN_BATCH: the rows from which llama.cpp moves products with host experts to a GPU.

Moved experts cross PCIe in every step. That pays in prefill; in decode, where each sequence is one row, it depends:
from a mapped file, 32 sequences were measured five times slower than 16, but from pinned memory and with hundreds of
sequences moving is faster than the CPU. The forecast covers both. The engine reads the variable at start, and it
applies to prefill and decode.
"""

from dataclasses import dataclass, replace

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.forecast import decode_speed

LEAST_ROWS = 128  # lower bound of the threshold, so that a few more sequences do not reach it
WORTH = 1.2  # decode moves to the GPU if the forecast is faster than the CPU by this factor
_NEVER = 1 << 30  # more rows than any batch


@dataclass(frozen=True, slots=True)
class There:
    """Predicted decode speed of all sequences with experts copied to the GPU in every step, and on the CPU."""

    moved_tok_s: float
    processors_tok_s: float

    @property
    def pays(self) -> bool:
        """Whether copying is faster by more than the forecast's error."""
        return self.moved_tok_s > WORTH * self.processors_tok_s


def set_rows(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement, asked: int | None = None
) -> int | None:
    """The variable's value for a plan; None keeps the engine's own threshold, or nothing ever moves.

    A requested value (`asked`) is kept. Otherwise the variable is set where decoding all sequences would reach the
    engine's threshold and be slower there, or of unknown speed. Where moving is faster, smaller batches for which it is
    slower stay on the CPU.
    """
    own = _own_rows(profile, settings, placement)
    if own is None or asked is not None:
        return None if own is None else asked
    if settings.sequences < own:
        return None
    found = there(machine, profile, settings, placement)
    if found is None or not found.pays:
        return max(LEAST_ROWS, 1 << settings.sequences.bit_length())
    rows = own
    while rows < settings.sequences and not _as_fast(
        there(machine, profile, replace(settings, sequences=rows), placement)
    ):
        rows *= 2
    return None if rows == own else min(rows, settings.sequences)


def _as_fast(found: There | None) -> bool:
    return found is not None and found.moved_tok_s >= found.processors_tok_s


def there(machine: Machine, profile: Profile, settings: Settings, placement: Placement) -> There | None:
    """Both predicted speeds; None if no step ever moves or a fact is unknown."""
    if _own_rows(profile, settings, placement) is None:
        return None
    moved, still = (
        decode_speed(
            machine,
            profile,
            settings,
            placement,
            depth=settings.context // 2,
            sequences=settings.sequences,
            min_batch=rows,
        )
        for rows in (1, _NEVER)
    )
    return None if moved is None or still is None else There(moved.tok_s, still.tok_s)


def left_to_cards(machine: Machine, profile: Profile, settings: Settings, placement: Placement) -> There | None:
    """Both speeds if GPUs decode with host experts under these settings; None if they do not or it is slower."""
    rows = rows_in_force(profile, settings, placement)
    if rows is None or settings.sequences < rows:
        return None
    found = there(machine, profile, settings, placement)
    return found if found is not None and found.pays else None


def rows_in_force(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The threshold that applies to an engine with these settings; None: nothing ever moves."""
    own = _own_rows(profile, settings, placement)
    return own if own is None or settings.offload_min_batch is None else settings.offload_min_batch


def _own_rows(profile: Profile, settings: Settings, placement: Placement) -> int | None:
    """The engine's default threshold; None if it has no such variable or no GPU computes with host experts."""
    traits = TRAITS[settings.engine]
    if traits.ik is not None or not placement.gpus:
        return None
    homes = zip(profile.tensors, placement.homes, strict=True)
    on_host = any(tensor.cls is TensorClass.ROUTED_EXPERTS and not home.startswith("gpu") for tensor, home in homes)
    return traits.offload_rows if on_host else None
