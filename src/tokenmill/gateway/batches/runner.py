"""Runs batches that were submitted by HTTP: checks the file, stores its jobs, lets workers run them, writes results.

    validating -> in_progress -> finalizing -> completed | expired        failed: the file is invalid
    validating, in_progress -> cancelling -> cancelled

Every step starts from the state in the store, so a new gateway continues after a kill. The job batch has the name of
the HTTP batch, so it is stored only once. One loop advances all unfinished batches; slow steps are separate tasks. The
store is locked only while there are unfinished batches, so that `tokenmill run` can use it in between.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.errors import StoreError, TokenmillError, UnknownModel, UsageError
from tokenmill.gateway.batches.files import FileStore
from tokenmill.gateway.batches.result_files import check_input, ended_late, write_results
from tokenmill.gateway.batches.workers import BackendWorkers
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Submission
from tokenmill.jobs.store.http_batches import RESPONSE_ID, HttpBatch, HttpBatches, Outcome, RefusedLine, Status
from tokenmill.jobs.store.store import Store

TICK_S = 1.0  # polling interval while there are unfinished batches
SWEEP_S = 600.0  # interval between searches for expired files
_RETRY_S = 5.0  # after a step failed
_EXPIRED = "deadline"  # error code of expired jobs in the store


class _Stopped(Exception):
    """The gateway is stopping while a file is being stored."""


class HttpBatchRunner:
    """Advances batches in the gateway's event loop, between `start` and `stop`."""

    def __init__(
        self,
        state: GatewayState,
        rows: HttpBatches,
        files: FileStore,
        folder: Path,
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._rows = rows
        self._files = files
        self._folder = folder
        self._tick_s = tick_s
        self._clock = clock
        self._store: Store | None = None
        self._workers = BackendWorkers(state, tick_s=tick_s, clock=clock, wake=self.wake)
        self._steps: dict[str, asyncio.Task[None]] = {}  # running slow steps by batch
        self._retry_at_s: dict[str, float] = {}  # by batch, after a failed step
        self._woken = asyncio.Event()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self._loop_s = asyncio.get_running_loop().time
        self._swept_s: float | None = None
        self._trouble: str | None = None  # last error of the loop; logged when it changes

    def start(self) -> None:
        """Start the loop."""
        self._main = asyncio.create_task(self._run())
        self._main.add_done_callback(self._log_failure)

    async def stop(self) -> None:
        """Stop the loop and all workers; jobs in flight return to the queue."""
        self._stopping = True
        self.wake()
        if self._main is not None:
            await self._main

    def wake(self) -> None:
        """Check for new batches now."""
        self._woken.set()

    def _log_failure(self, main: "asyncio.Task[None]") -> None:
        if not main.cancelled() and (bug := main.exception()) is not None:  # `stop` raises it
            self._state.log({"event": "batches_stopped", "why": f"internal error: {bug!r}"})

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._woken.clear()
                busy = await self._advance_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_s if busy else SWEEP_S):
                        await self._woken.wait()
        finally:
            self._stopping = True
            await self._workers.stop()
            await asyncio.gather(*self._steps.values(), return_exceptions=True)
            await self._close_store()

    async def _advance_all(self) -> bool:
        """Advance all unfinished batches; returns whether to check again soon."""
        try:
            await self._sweep()
            batches = await asyncio.to_thread(self._rows.unfinished)
            if not batches:
                if not self._steps and not self._workers.busy:
                    await self._close_store()
                return self._store is not None
            store = await self._open_store()
            await self._settle(store)
            for batch in batches:
                if batch.id not in self._steps and self._retry_at_s.get(batch.id, 0.0) <= self._loop_s():
                    await self._advance(store, batch)
            self._trouble = None
        except (StoreError, OSError) as error:
            trouble = error.message if isinstance(error, StoreError) else str(error)
            if self._trouble != trouble:
                self._trouble = trouble
                self._state.log({"event": "batches_wait", "why": " ".join(trouble.split())})
        return True

    async def _settle(self, store: Store) -> None:
        """Expire jobs, and cancel batches that no worker runs; other processes may have requested that."""
        await asyncio.to_thread(store.expire)
        for batch in await asyncio.to_thread(store.cancel_requests):
            if not self._workers.has(batch):
                await asyncio.to_thread(store.cancel, batch)

    async def _sweep(self) -> None:
        now_s = self._loop_s()
        if self._swept_s is None or now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            await asyncio.to_thread(self._files.sweep)

    async def _open_store(self) -> Store:
        if self._store is None:
            self._store = await asyncio.to_thread(lambda: Store(self._folder, clock=self._clock))
        return self._store

    async def _close_store(self) -> None:
        store = self._store
        self._store = None
        if store is not None:
            await asyncio.to_thread(store.close)

    # ---- one batch

    async def _advance(self, store: Store, batch: HttpBatch) -> None:
        """Take the next step of a batch."""
        jobs = await asyncio.to_thread(_job_batch, store, batch)
        expired = batch.expires_s <= self._clock()
        cancelling = batch.cancelling_s is not None
        if jobs is None or jobs.sealed_s is None:
            if not cancelling and not expired:
                self._start_step(batch, self._admit(store, batch))
                return
            if jobs is not None:  # partly stored before a kill
                await asyncio.to_thread(store.submissions.forget, jobs.id)
            await self._end(batch, "cancelled" if cancelling else "expired", even_cancelling=cancelling)
        elif jobs.finished:
            self._workers.done(jobs.id)
            if await asyncio.to_thread(self._rows.finalize, batch.id):
                self._log(batch, "finalizing")
            self._start_step(batch, self._finish(store, batch))
        elif cancelling or expired:  # jobs in flight are late as well
            if self._workers.has(jobs.id):
                await asyncio.to_thread(store.ask_cancel, jobs.id)  # the worker cancels it after releasing its jobs
            else:
                await asyncio.to_thread(store.cancel, jobs.id)
                self.wake()
        else:
            await self._workers.run(store, jobs, batch)

    async def _admit(self, store: Store, batch: HttpBatch) -> None:
        """Check the input file and store its jobs."""
        path = self._files.path(batch.input_file_id)
        if not path.is_file():
            await self._refuse(batch, RefusedLine("file_not_found", f"the file {batch.input_file_id} was deleted"))
            return
        checked = await asyncio.to_thread(check_input, path, batch.endpoint, should_continue=lambda: not self._stopping)
        if self._stopping:
            return
        if checked.errors:
            await self._refuse(batch, *checked.errors)
            return
        try:
            chain = self._state.routes.choose(checked.model, "batch", None, self._state.key_name(batch.owner))
        except UnknownModel as error:
            await self._refuse(batch, RefusedLine("model_not_found", error.message, 1, "body.model"))
            return
        await asyncio.to_thread(self._rows.set_model, batch.id, checked.model)
        how = Submission(
            chain[0].engine.identity.model_id,
            output=str(self._files.path(batch.output_file_id)),
            errors=str(self._files.path(batch.error_file_id)),
            priority=batch.priority,
            deadline_s=batch.expires_s,
            reuse=not batch.id.startswith(RESPONSE_ID),  # a client that repeats a background response wants another
            name=batch.id,
            owner=None if self._state.config.gateway.share_answers else batch.owner,
        )
        try:
            await asyncio.to_thread(submit, store, path, how, progress=self._check_stopping)
        except UsageError as error:
            await self._refuse(batch, RefusedLine("invalid_file", error.message.replace(str(path), "the file")))
            return
        stored = await asyncio.to_thread(self._rows.batch, batch.id)
        if stored is not None and stored.status == "in_progress":
            self._log(batch, "in_progress")

    def _check_stopping(self, _line: int) -> None:
        """Called for every stored line; raises _Stopped when the gateway stops."""
        if self._stopping:
            raise _Stopped

    async def _finish(self, store: Store, batch: HttpBatch) -> None:
        """Write the results of a batch and end it; if stored answers are damaged, requeue their jobs instead."""
        jobs = await asyncio.to_thread(store.named, batch.id)
        if await asyncio.to_thread(store.requeue_damaged, jobs.id):
            return
        await asyncio.to_thread(write_results, self._files, store, jobs, batch, now_s=self._clock())
        failures = await asyncio.to_thread(store.failures_by_code, jobs.id)
        status: Status = "completed"
        if ended_late(jobs, batch) or (jobs.cancelled_s is None and _EXPIRED in failures):
            status = "expired"
        elif jobs.cancelled_s is not None:
            status = "cancelled"
        await self._end(batch, status, even_cancelling=True, outcome=Outcome.of(jobs.counts, jobs.totals))

    async def _refuse(self, batch: HttpBatch, *errors: RefusedLine) -> None:
        await self._end(batch, "failed", even_cancelling=False, errors=errors)

    async def _end(self, batch: HttpBatch, status: Status, **how: Any) -> None:
        if await asyncio.to_thread(lambda: self._rows.end(batch.id, status, **how)):
            self._log(batch, status)

    def _log(self, batch: HttpBatch, status: Status) -> None:
        self._state.log({"event": "batch", "batch": batch.id, "status": status})

    def _start_step(self, batch: HttpBatch, step: Coroutine[Any, Any, None]) -> None:
        """Run a slow step as a task; a failed step is retried after _RETRY_S."""

        async def go() -> None:
            self._retry_at_s[batch.id] = self._loop_s() + _RETRY_S
            try:
                await step
                self._retry_at_s.pop(batch.id, None)
            except _Stopped:
                pass
            except TokenmillError as error:
                self._state.log({"event": "batch_waits", "batch": batch.id, "why": " ".join(error.message.split())})
            finally:
                del self._steps[batch.id]
                self.wake()

        def over(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (bug := task.exception()) is not None:
                self._state.log({"event": "batch_waits", "batch": batch.id, "why": f"internal error: {bug!r}"})

        self._steps[batch.id] = asyncio.create_task(go())
        self._steps[batch.id].add_done_callback(over)


def _job_batch(store: Store, batch: HttpBatch) -> Batch | None:
    """The job batch of an HTTP batch, complete or not; None if it is not stored yet."""
    try:
        return store.named(batch.id)
    except UsageError:
        return None
