"""What a way to another machine must offer, whatever carries it."""

from typing import Any, Protocol


class Lost(Exception):
    """Nobody answers there; the message says what is known of why. Does not leave this room."""

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message)
        self.message = message
        self.for_good = for_good  # else it may answer again


class Channel(Protocol):
    """A way to one host. What is called runs there whether its caller waits or not."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the host returns; Lost if that cannot be had."""

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method and do not wait for it."""

    def end(self) -> None:
        """End the host with all it started."""
