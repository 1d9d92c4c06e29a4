"""Merging several streams."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tokenmill.errors import EngineError
from tokenmill.gateway.streaming import merged


class Source:
    """Numbers up to a count, then perhaps an error; remembers that it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.closed, self.given = count, error, False, 0

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.given += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_all_of_all_in_their_own_order() -> None:
    async def work() -> list[tuple[int, int]]:
        sources = [Source(3), Source(200), Source(0)]
        async with asyncio.timeout(20), merged([source.stream() for source in sources]) as events:
            found = [event async for event in events]
        assert all(source.closed for source in sources)
        return found

    found = asyncio.run(work())
    assert [number for index, number in found if index == 0] == [0, 1, 2]
    assert [number for index, number in found if index == 1] == list(range(200))
    assert len(found) == 203


@pytest.mark.parametrize("error", [EngineError("broken"), RuntimeError("a bug")])
def test_the_first_error_ends_all(error: Exception) -> None:
    async def work() -> None:
        sources = [Source(2, error), Source(10**9)]

        async def read() -> None:
            async with asyncio.timeout(20), merged([source.stream() for source in sources]) as events:
                async for _ in events:
                    pass

        with pytest.raises(type(error), match=str(error)):
            await read()
        assert all(source.closed for source in sources)

    asyncio.run(work())


def test_streams_wait_for_a_slow_consumer() -> None:
    async def work() -> None:
        sources = [Source(10**9), Source(10**9)]
        async with asyncio.timeout(20), merged([source.stream() for source in sources]) as events:
            await anext(aiter(events))
            for _ in range(1000):
                await asyncio.sleep(0)
            assert sum(source.given for source in sources) < 100
        assert all(source.closed for source in sources)

    asyncio.run(work())
