"""How a llama.cpp context is to be made: for whoever plans and orders one, who need not load what computes."""

from dataclasses import dataclass

from tokenmill.config import MAX_THREADS
from tokenmill.errors import UsageError


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How a context is made."""

    cells: int  # of all sequences together
    context: int  # tokens of one sequence at most: for whoever admits sequences
    sequences: int = 8  # ids 0 to sequences - 1; each costs the room for a row of logits
    ubatch: int = 512
    batch: int = 2048
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    threads: int = 4
    threads_batch: int = 4
    moe_cache_bytes: int = 0
    op_offload: bool = True
    streams: bool = False  # each sequence has cells / sequences of its own: see streams.py

    def __post_init__(self) -> None:
        for name in ("threads", "threads_batch"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_THREADS:
                raise UsageError(
                    f"{name} must be 1-{MAX_THREADS} (got {value})", hint="use the number of physical cores"
                )
