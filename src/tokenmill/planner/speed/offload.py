"""From how many rows llama.cpp moves products with host experts to a GPU, and when a plan moves that point.

The experts cross PCIe each time. In prefill that pays. In decoding, where every sequence is a row, it depends: from a
mapped file, 32 sequences were measured five times slower than 16; from pinned memory and with hundreds of sequences a
step costs what one of a few hundred prompt tokens does, and processors need longer for it. The forecast knows both.
GGML_OP_OFFLOAD_MIN_BATCH is read when the engine starts, and holds for prefill and decoding.
"""

from dataclasses import dataclass, replace

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.forecast import decode_speed

LEAST_ROWS = 128  # a threshold that is set is never lower, so that some more sequences do not reach it
WORTH = 1.2  # times the processors' speed, by the forecast, for decoding to be left to the GPU
_NEVER = 1 << 30  # rows that no batch has


@dataclass(frozen=True, slots=True)
class There:
    """Decoding all sequences with the experts copied to the GPU in every step, and with the processors computing."""

    moved_tok_s: float
    processors_tok_s: float

    @property
    def pays(self) -> bool:
        """Whether copying is faster, and by more than a forecast may be off."""
        return self.moved_tok_s > WORTH * self.processors_tok_s


def set_rows(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement, asked: int | None = None
) -> int | None:
    """The variable's value under a plan; None: the engine's own threshold stays, or nothing ever moves.

    What is `asked` for is taken; else it is set where decoding all sequences would reach the engine's own, and would
    be slower there or nobody knows. Where it is faster, fewer rows that are not stay with the processors.
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
    """What the forecast says of both; None where no step ever moves, or the machine does not state enough."""
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
    """Why cards decode with experts of host memory under these settings; None: they do not, or it does not pay."""
    rows = rows_in_force(profile, settings, placement)
    if rows is None or settings.sequences < rows:
        return None
    found = there(machine, profile, settings, placement)
    return found if found is not None and found.pays else None


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
