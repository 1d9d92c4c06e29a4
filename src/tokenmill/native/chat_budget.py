"""What one rendering of a chat template may take, and how it fails.

A template out of a model file may loop for ever or grow a text without end. Whatever it does is paid for here before
it is done: in steps, each well under a microsecond of work, and in characters of text made. The count is of what is
done, not of time: the same conversation is refused or not on every machine. The processor's clock is looked at only
now and then, against templates that find a way to make steps slow.
"""

from dataclasses import dataclass
from time import thread_time

_CHARACTERS_A_STEP = 16
_MOST_ITEMS = 1_000_000
_STEPS_A_LOOK = 500_000  # between two looks at the clock


class Failed(Exception):
    """The template cannot be compiled, or gave up on this conversation; the text says why, in its own words."""


class Refusal(Failed):
    """The template said no itself, with `raise_exception`."""


class Exhausted(Failed):
    """The template took more than it is given."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take; a million steps take about 50 ms of one core at most."""

    steps: int = 40_000_000
    steps_a_message: int = 100_000  # more for long conversations: some templates look back from each message
    most_steps: int = 200_000_000
    characters: int = 64 << 20  # in all texts made on the way
    output: int = 8 << 20  # characters
    cpu_s: float = 10.0


class Budget:
    """What is left of the limits of one rendering."""

    __slots__ = ("_look_at", "_until_s", "characters", "steps")

    def __init__(self, limits: Limits, messages: int = 0) -> None:
        self.steps = min(limits.most_steps, limits.steps + messages * limits.steps_a_message)
        self.characters = limits.characters
        self._look_at = self.steps - _STEPS_A_LOOK
        self._until_s = thread_time() + limits.cpu_s

    def spend(self, steps: int) -> None:
        """Mutates. Pay for work about to be done."""
        self.steps -= steps
        if self.steps < 0:
            raise Exhausted("it took too many steps")
        if self.steps < self._look_at:
            self._look_at = self.steps - _STEPS_A_LOOK
            if thread_time() > self._until_s:
                raise Exhausted("it took too long")

    def read(self, characters: int) -> None:
        """Mutates. Pay for looking through a text."""
        self.spend(1 + characters // _CHARACTERS_A_STEP)

    def make(self, characters: int) -> None:
        """Mutates. Pay for a text before it is made."""
        self.characters -= characters
        if self.characters < 0:
            raise Exhausted("it made too much text")
        self.read(characters)

    def collect(self, items: int) -> None:
        """Mutates. Pay for a list of new values before it is made."""
        self.spend(1 + 16 * items)

    def copy(self, items: int) -> None:
        """Mutates. Pay for a list of values that are there already before it is made."""
        if items > _MOST_ITEMS:
            raise Exhausted(f"it made a list of more than {_MOST_ITEMS} values")
        self.spend(1 + items // 2)
