"""The store, the files and the runner of batches, which are open while the gateway serves."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from tokenmill.api.stores import BATCHES
from tokenmill.gateway.batches.files import FileStore
from tokenmill.gateway.batches.runner import TICK_S, HttpBatchRunner
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.store.gateway_db import migrate_gateway_db
from tokenmill.jobs.store.http_batches import HttpBatches


@dataclass(slots=True)
class BatchService:
    """Rows, files and the runner; shared by batches and background responses."""

    state: GatewayState
    tick_s: float = TICK_S
    clock: Callable[[], float] = time.time
    _opened: tuple[HttpBatches, FileStore, HttpBatchRunner] | None = field(default=None, init=False)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Open the store, import the database of an older version, and run batches until the gateway stops."""
        folder = self.state.state_path / BATCHES
        rows = await asyncio.to_thread(lambda: HttpBatches(folder, clock=self.clock))
        try:
            await asyncio.to_thread(migrate_gateway_db, folder, rows)
            files = FileStore(folder, rows)
            runner = HttpBatchRunner(self.state, rows, files, folder, tick_s=self.tick_s, clock=self.clock)
            self._opened = rows, files, runner
            runner.start()
            try:
                async with self._saving():
                    yield
            finally:
                await runner.stop()
        finally:
            self._opened = None
            rows.close()

    def _saving(self) -> AbstractAsyncContextManager[None]:
        budget = self.state.limiter.budget
        if budget is None:
            return nullcontext()
        return budget.saving(lambda why: self.state.log({"event": "tokens_not_saved", "why": why}))

    def files(self) -> tuple[HttpBatches, FileStore]:
        """Rows and files; raises GatewayFault until the gateway serves."""
        if self._opened is None:
            raise GatewayFault("the gateway is still starting", status=503, code="starting", retry_after_s=1.0)
        return self._opened[:2]

    def rows(self) -> HttpBatches:
        """Rows; raises GatewayFault until the gateway serves."""
        return self.files()[0]

    def wake(self) -> None:
        """Make the runner check for new batches now."""
        if self._opened is not None:
            self._opened[2].wake()
