"""What one of several workers may take of the pending jobs, so that each head is computed by as few as needed.

A portion only says who should take what. That no job is taken twice is the store's affair: `Store.start` gives it to
one. So a portion may change hands at any moment, and what was read from it before is no promise.

A job that is too long for one worker, or whose answer would be cut short there, is left to those with a larger context.
It fails, or is cut short, when none of them lives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from tokenmill.errors import TooLong
from tokenmill.jobs.models import Waiting
from tokenmill.units import number_of


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker can do: others leave to it what is too long for them."""

    model_id: str
    room: int | None  # tokens of one sequence at most; None: not known, or not yet
    batches: tuple[int, ...] | None = None  # that it works on; None: all of its model


def most_room(rooms: Iterable[int | None]) -> float:
    """The largest context of some; one that is not known may be as large as any."""
    return max((inf if room is None else room for room in rooms), default=0)


def of_the_largest(error: TooLong, room: float) -> TooLong:
    """The error of a job that is too long for every worker, with the context of the largest of them."""
    if room <= error.context_tokens:
        return error
    over = number_of(max(1, error.needed_tokens - int(room)), "token")
    return TooLong(
        f"it needs {error.needed_tokens} tokens, and the largest context of those at work has {int(room)}: "
        f"{over} too many",
        needed_tokens=error.needed_tokens,
        context_tokens=int(room),
        hint=error.hint,
    )


class ShardView(Protocol):
    """One worker's. Called from the thread of its books, one call after another."""

    def ready(self, means: WorkerSpec, lanes: int) -> None:
        """What its worker can do, or will once its engine is there."""

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        """The next pending jobs of these batches, by priority, batch and place within each stretch that it gets.

        `again`: from the beginning of what it has. Fewer than the limit: no more is to be had for now.
        """

    def has(self, waiting: Waiting) -> bool:
        """Whether it may take this one, which was found in another way than through the window."""

    def too_long(self, job: int, error: TooLong) -> TooLong | None:
        """A job, or its answer, is too long for its worker. None: it is left to others, and not given to it again; else
        what to fail it with."""

    def hopeless(self) -> list[tuple[int, TooLong]]:
        """Jobs that were left to others of which none lives any more that could do them, to be failed; told once."""

    def tend(self) -> None:
        """From time to time, at least every second: its worker lives."""

    def close(self) -> None:
        """Its worker takes nothing more: what it has and did not begin is anyone's."""
