"""From tokens' bytes to text that may be shown: never half a character, never part of a stop string."""

import codecs
from collections.abc import Iterable


class Detokenizer:
    """Joins tokens' bytes into text and holds back a character that is not whole yet."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: bytes) -> str:
        """The text that these bytes complete."""
        return self._decoder.decode(piece)

    def end(self) -> str:
        """What is left at the end: U+FFFD for half a character."""
        return self._decoder.decode(b"", final=True)


class Stops:
    """Looks for stop strings in text that comes in parts.

    It returns text that cannot be part of a stop string, and nothing after a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._most = max(map(len, self._stops), default=1) - 1  # characters that may be the beginning of one
        self._held = ""
        self.met = False

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that can be shown now, and whether a stop string was found."""
        if self.met:
            return "", True
        if not self._stops:
            return text, False
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.met = True
            self._held = ""
            return held[: min(places)], True
        keep = self._beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def end(self) -> str:
        """What was held back and turned out to be no stop string."""
        held = self._held
        self._held = ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._most, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
