"""Several streams as one: events with the number of their stream, in the order in which they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
_ROOM = 64  # events that may wait for who reads


@asynccontextmanager
async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[AsyncIterator[tuple[int, T]]]:
    """Read all of them at once; the first error ends all. Leaving closes every stream."""
    room = asyncio.Semaphore(_ROOM)
    came: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for event in stream:
                await room.acquire()
                came.put_nowait((number, event))

    async def events() -> AsyncIterator[tuple[int, T]]:
        left = len(streams)
        while left:
            item = await came.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
                continue
            room.release()
            yield item

    def over(task: "asyncio.Task[None]") -> None:
        came.put_nowait(None if task.cancelled() else task.exception())

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(over)
    try:
        yield events()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
