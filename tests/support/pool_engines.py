"""Worker pools of fake engines for tests: one that waits for a signal, and one whose speed depends on other engines."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from support.fake_engine import FakeEngine, Seen
from support.worked import QUICK
from tokenmill.engine.engine import Answer, Engine, Piece, Request
from tokenmill.errors import EngineError
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.pool import PoolMember, PoolMembers, PoolReport, run_pool

LIMIT_S = 120.0
_ALONE_S = 1.0  # after which a waiting engine assumes that the others have nothing more to do


class Gated(FakeEngine):
    """Begins streams and ends none before `opened` is set."""

    def __init__(self, seen: Seen | None = None, *, slots: int = 4) -> None:
        super().__init__(seen, slots=slots)
        self.opened = asyncio.Event()

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        async for event in super().stream(request):
            if isinstance(event, Answer):
                opened = asyncio.create_task(self._open())
                either: set[asyncio.Future[None] | asyncio.Future[EngineError]] = {opened, self.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                await self._until_alive(0.0)
            yield event

    async def _open(self) -> None:
        await self.opened.wait()


class Counting(FakeEngine):
    """Counts its answers and wakes those that wait for them; `behind`: each of its own waits for that many of another's."""

    def __init__(self, *, slots: int = 4, behind: "tuple[int, Counting] | None" = None) -> None:
        super().__init__(slots=slots)
        self.answers = 0
        self._behind = behind
        self._answered = asyncio.Condition()

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        async for event in super().stream(request):
            if isinstance(event, Answer):
                if self._behind is not None:
                    await self._behind[1].more(self._behind[0])
                self.answers += 1
                async with self._answered:
                    self._answered.notify_all()
            yield event

    async def more(self, answers: int) -> None:
        """Wait for a number of further answers, or until none has come for a while."""
        enough = self.answers + answers
        while self.answers < enough:
            before = self.answers
            with suppress(TimeoutError):
                async with asyncio.timeout(_ALONE_S), self._answered:
                    await self._answered.wait()
            if self.answers == before:
                return


def hand(name: str, engine: Engine) -> PoolMember:
    """An engine as it is."""
    return PoolMember(name, engine, shape_of(engine.capabilities, engine.identity))


async def run_test_pool(store: Store, batches: Sequence[Batch], hands: PoolMembers, **more: Any) -> PoolReport:
    """Work batches with their outputs, for two minutes at most; engines are not closed."""
    with ExitStack() as stack:
        outputs = {batch.id: stack.enter_context(Output(store, batch)) for batch in batches}
        async with asyncio.timeout(LIMIT_S):
            return await run_pool(store, batches, hands, outputs=outputs, **({"options": QUICK} | more))
