"""Converts token bytes to streamable text; holds back incomplete characters and possible stop strings."""

import codecs
from collections.abc import Iterable


class Detokenizer:
    """Joins tokens' bytes into text and holds back an incomplete character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: bytes) -> str:
        """The text that these bytes complete."""
        return self._decoder.decode(piece)

    def end(self) -> str:
        """The remaining text: U+FFFD for an incomplete character, otherwise empty."""
        return self._decoder.decode(b"", final=True)


class Stops:
    """Finds stop strings in streamed text.

    `add` returns only text that cannot be part of a stop string, and nothing after a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._most = max(map(len, self._stops), default=1) - 1  # longest incomplete stop string
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
        """The text that is still held back; it did not become a stop string."""
        held = self._held
        self._held = ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        for length in range(min(self._most, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
