"""Works on what was handed in: checks files, stores their jobs, has engines answer them, writes results.

    validating -> in_progress -> finalizing -> completed | expired        failed: the file is no batch
    any of the first three -> cancelling -> cancelled

Every step begins from what is on the disk, so that after a kill the next gateway goes on where this one was. One loop
looks at all batches that are not finished; what takes long goes on beside it. The store is held only while there are
such batches: a `tokenmill run` may have it between them, and what is handed in then waits.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.errors import StoreError, TokenmillError, UnknownModel, UsageError
from tokenmill.gateway.batch_check import check_file
from tokenmill.gateway.batch_crews import Crews
from tokenmill.gateway.batch_records import BadLine, BatchRecord, Status, of_counts
from tokenmill.gateway.batch_repository import BatchRepository
from tokenmill.gateway.batch_results import ended_late, write_results
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.models import Batch, Submission
from tokenmill.jobs.store import Store
from tokenmill.jobs.submit import submit

TICK_S = 1.0  # between two looks while there is work
SWEEP_S = 600.0  # between two searches for files whose time is over
_TROUBLE_S = 5.0  # after which something that failed is tried again
_EXPIRED = "deadline"  # as the store calls it


class _Stopped(Exception):
    """The gateway ends while a file is being read."""


class BatchRunner:
    """Runs beside the gateway; belongs to its event loop."""

    def __init__(
        self,
        state: GatewayState,
        desk: BatchRepository,
        folder: Path,
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._desk = desk
        self._folder = folder
        self._tick_s = tick_s
        self._clock = clock
        self._store: Store | None = None
        self._crews = Crews(state, tick_s=tick_s, clock=clock, wake=self.wake)
        self._steps: dict[str, asyncio.Task[None]] = {}  # by batch: what takes long
        self._later_s: dict[str, float] = {}  # by batch: when to try again after trouble
        self._woken = asyncio.Event()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self._loop_s = asyncio.get_running_loop().time
        self._swept_s: float | None = None
        self.trouble: str | None = None  # why nothing goes on, for who asks

    def start(self) -> None:
        """Begin; `stop` ends it."""
        self._main = asyncio.create_task(self._run())
        self._main.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End within moments; what engines had in hand is put back."""
        self._stopping = True
        self.wake()
        if self._main is not None:
            await self._main

    def _ended(self, main: "asyncio.Task[None]") -> None:
        if not main.cancelled() and (bug := main.exception()) is not None:  # `stop` raises it
            self.trouble = f"tokenmill itself failed: {bug!r}"
            self._state.log({"event": "batches_stopped", "why": self.trouble})

    def wake(self) -> None:
        """Something has changed: look at once."""
        self._woken.set()

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._woken.clear()
                busy = await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_s if busy else SWEEP_S):
                        await self._woken.wait()
        finally:
            self._stopping = True
            await self._crews.stop()
            await asyncio.gather(*self._steps.values(), return_exceptions=True)
            await self._let_go()

    async def _look(self) -> bool:
        """One look at everything; whether another is needed soon."""
        try:
            await self._sweep()
            tickets = await asyncio.to_thread(self._desk.unfinished)
            if not tickets:
                if not self._steps and not self._crews.busy:
                    await self._let_go()
                return self._store is not None
            store = await self._held()
            self._crews.store = store
            await self._settle(store)
            for ticket in tickets:
                if ticket.id not in self._steps and self._later_s.get(ticket.id, 0.0) <= self._loop_s():
                    await self._advance(store, ticket)
            self.trouble = None
        except (StoreError, OSError) as error:
            said = error.message if isinstance(error, StoreError) else str(error)
            if self.trouble != said:
                self.trouble = said
                self._state.log({"event": "batches_wait", "why": " ".join(said.split())})
        return True

    async def _settle(self, store: Store) -> None:
        """What no crew sees to: deadlines of jobs that nobody works on, and words left by other processes."""
        await asyncio.to_thread(store.expire)
        for batch in await asyncio.to_thread(store.asked_to_cancel):
            if not self._crews.has(batch):
                await asyncio.to_thread(store.cancel, batch)

    async def _sweep(self) -> None:
        now_s = self._loop_s()
        if self._swept_s is None or now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            await asyncio.to_thread(self._desk.sweep)

    # The store.

    async def _held(self) -> Store:
        if self._store is None:
            self._store = await asyncio.to_thread(lambda: Store(self._folder, clock=self._clock))
        return self._store

    async def _let_go(self) -> None:
        store = self._store
        self._store = None
        self._crews.store = None
        if store is not None:
            await asyncio.to_thread(store.close)

    # One batch.

    async def _advance(self, store: Store, ticket: BatchRecord) -> None:
        """The next step of one batch."""
        batch = await asyncio.to_thread(_stored, store, ticket)
        if batch is None:
            if ticket.status == "cancelling":
                await self._move(ticket, "cancelled", since=("cancelling",))
            elif ticket.expires_s <= self._clock():
                await self._move(ticket, "expired", since=(ticket.status,))
            else:
                self._beside(ticket, self._admit(store, ticket))
            return
        if ticket.status == "validating":
            await self._move(ticket, "in_progress", since=("validating",))
            self.wake()
        elif batch.finished:
            self._crews.done(batch.id)
            await self._move(ticket, "finalizing", since=("in_progress",))
            self._beside(ticket, self._finish(store, ticket))
        elif ticket.status == "cancelling" or ticket.expires_s <= self._clock():  # what still runs is too late, too
            if self._crews.has(batch.id):
                await asyncio.to_thread(store.ask_cancel, batch.id)  # who works on it lets go of it first
            else:
                await asyncio.to_thread(store.cancel, batch.id)
                self.wake()
        else:
            await self._crews.work_on(batch, ticket)

    async def _admit(self, store: Store, ticket: BatchRecord) -> None:
        """Check a file and store its jobs."""
        since: tuple[Status, ...] = ("validating", "in_progress", "finalizing")
        path = self._desk.path(ticket.input_file_id)
        if not path.is_file():
            gone = BadLine("file_not_found", f"the file {ticket.input_file_id} is not there any more")
            await self._move(ticket, "failed", since=since, errors=(gone,))
            return
        checked = await asyncio.to_thread(check_file, path, ticket.endpoint, go_on=lambda: not self._stopping)
        if self._stopping:
            return
        errors = checked.errors
        model_id = None
        if not errors:
            try:
                chain = self._state.routes.choose(checked.model, "batch", None, ticket.owner)
                model_id = chain[0].engine.identity.model_id
            except UnknownModel as error:
                errors = (BadLine("model_not_found", error.message, 1, "body.model"),)
        if errors or model_id is None:
            await self._move(ticket, "failed", since=since, errors=errors)
            return
        # now, because a kill may come between the last line and the next status
        await asyncio.to_thread(self._desk.move, ticket.id, "validating", since=("validating",), model=checked.model)
        how = Submission(
            model_id,
            output=str(self._desk.path(ticket.output_file_id)),
            errors=str(self._desk.path(ticket.error_file_id)),
            priority=ticket.priority,
            deadline_s=ticket.expires_s,
            name=ticket.id,
        )
        try:
            await asyncio.to_thread(submit, store, path, how, progress=self._still)
        except UsageError as error:
            said = error.message.replace(str(path), "the file")
            await self._move(ticket, "failed", since=since, errors=(BadLine("invalid_file", said),))
            return
        await self._move(ticket, "in_progress", since=("validating",))

    def _still(self, _line: int) -> None:
        """Called while lines are stored; what is stored so far is found again."""
        if self._stopping:
            raise _Stopped

    async def _finish(self, store: Store, ticket: BatchRecord) -> None:
        """Write what a batch came to, and end it; one with damaged answers is worked on again instead."""
        batch = await asyncio.to_thread(store.named, ticket.id)
        if await asyncio.to_thread(store.requeue_damaged, batch.id):
            return
        await asyncio.to_thread(write_results, self._desk, store, batch, ticket)
        late = await asyncio.to_thread(store.failures_by_code, batch.id)
        status: Status = "completed"
        if ended_late(ticket, batch) or (batch.cancelled_s is None and _EXPIRED in late):
            status = "expired"
        elif batch.cancelled_s is not None:
            status = "cancelled"
        outcome = of_counts(batch.counts, batch.totals)
        await self._move(ticket, status, since=("in_progress", "finalizing", "cancelling"), outcome=outcome)

    def _beside(self, ticket: BatchRecord, step: Coroutine[Any, Any, None]) -> None:
        """Something that takes long; what goes wrong with it is tried again later."""

        async def go() -> None:
            self._later_s[ticket.id] = self._loop_s() + _TROUBLE_S
            try:
                await step
                self._later_s.pop(ticket.id, None)
            except _Stopped:
                pass
            except TokenmillError as error:
                self._state.log({"event": "batch_waits", "batch": ticket.id, "why": " ".join(error.message.split())})
            finally:
                del self._steps[ticket.id]
                self.wake()

        def over(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (bug := task.exception()) is not None:
                self._state.log(
                    {"event": "batch_waits", "batch": ticket.id, "why": f"tokenmill itself failed: {bug!r}"}
                )

        self._steps[ticket.id] = asyncio.create_task(go())
        self._steps[ticket.id].add_done_callback(over)

    async def _move(self, ticket: BatchRecord, status: Status, **how: Any) -> None:
        if await asyncio.to_thread(self._desk.move, ticket.id, status, **how):
            self._state.log({"event": "batch", "batch": ticket.id, "status": status})


def _stored(store: Store, ticket: BatchRecord) -> Batch | None:
    """The batch of a ticket with all its jobs; None: it is not there, or not whole."""
    try:
        batch = store.named(ticket.id)
    except UsageError:
        return None
    return batch if batch.sealed_s is not None else None
