"""A fake engine that accepts prompts up to a number of words, and reports the length of those that it refuses."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from support.fake_engine import FakeEngine, Seen
from tokenmill.engine.engine import Answer, Identity, Piece, Request, Usage
from tokenmill.errors import TooLong


class LimitedEngine(FakeEngine):
    """A word is a token. `says`: whether it tells how long a context it has.

    A prompt with `wordy` in it is answered up to the ceiling, or to the end of the context.
    """

    def __init__(self, context: int, seen: Seen | None = None, *, slots: int = 4, says: bool = True) -> None:
        super().__init__(seen, slots=slots)
        self._context, self._says = context, says
        self.refused = asyncio.Event()
        self.refusals: list[str] = []  # prompts

    @property
    def identity(self) -> Identity:
        return replace(super().identity, context=self._context if self._says else None)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        async for event in super().stream(request):
            if isinstance(event, Answer) and "wordy" in str(request.prompt):
                words = len(str(request.prompt).split())
                written = min(self._context - words, request.max_tokens or self._context)
                yield replace(event, finish_reason="length", usage=Usage(words, written, 0))
            else:
                yield event

    def _refuse(self, prompt: str, request: Request) -> None:
        words = len(prompt.split())
        if words > self._context:
            self.refusals.append(prompt)
            self.refused.set()
            raise TooLong(
                f"the prompt has {words} tokens and the context {self._context}: {words - self._context} too many",
                needed_tokens=words,
                context_tokens=self._context,
                hint="shorten it",
            )
        super()._refuse(prompt, request)


def prompt(name: str, words: int) -> str:
    """A prompt with a number of words."""
    return " ".join([name, *["word"] * (words - 1)])
