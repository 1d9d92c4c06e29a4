"""What one rendering of a chat template may take, and how it fails.

A template out of a model file may loop for ever or grow a text without end. Whatever it does is paid for here before
it is done: in steps, each well under a microsecond of work, and in characters of text made. The count is of what is
done, not of time: the same conversation is refused or not on every machine.
"""

from dataclasses import dataclass

_CHARACTERS_A_STEP = 64


class Failed(Exception):
    """The template cannot be compiled, or gave up on this conversation; the text says why, in its own words."""


class Refusal(Failed):
    """The template said no itself, with `raise_exception`."""


class Exhausted(Failed):
    """The template took more than it is given."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take."""

    steps: int = 80_000_000  # seconds of work at most
    characters: int = 64 << 20  # in all texts made on the way
    output: int = 8 << 20  # characters


class Budget:
    """What is left of the limits of one rendering."""

    __slots__ = ("characters", "steps")

    def __init__(self, limits: Limits) -> None:
        self.steps = limits.steps
        self.characters = limits.characters

    def spend(self, steps: int) -> None:
        """Mutates. Pay for work about to be done."""
        self.steps -= steps
        if self.steps < 0:
            raise Exhausted("it took too many steps")

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
        """Mutates. Pay for a list before it is made."""
        self.spend(1 + 16 * items)

    def copy(self, items: int) -> None:
        """Mutates. Pay for references copied into another list."""
        self.spend(1 + items // 2)
