"""An event loop with a clock that can be advanced, so that tests need not wait."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class AheadLoop(asyncio.SelectorEventLoop):
    """The ordinary loop but for its time."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._ahead_s

    def put_forward(self, seconds: float) -> None:
        """To be called inside it."""
        self._ahead_s += seconds


def pass_by(seconds: float) -> None:
    """So much time is over in the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AheadLoop)
    loop.put_forward(seconds)


def run_ahead(work: Callable[[], Awaitable[T]]) -> T:
    """Run a test's coroutine in such a loop; a limit on waiting would be passed by, too, so pytest's has to do."""

    async def whole() -> T:
        return await work()

    with asyncio.Runner(loop_factory=AheadLoop) as runner:
        return runner.run(whole())
