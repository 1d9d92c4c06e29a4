"""Stores a job file in the background while its first jobs already run.

`Ingest` stores lines in the caller's thread for up to FOREGROUND_S, which is enough for most files, and the rest in a
thread. Later jobs join the queue in prefix order. The output file is opened when the batch is sealed, because until
then the file can be refused (duplicate custom_id, damaged archive), and a refused file must leave neither a batch nor
output lines. Strict submissions and streams are stored completely first.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.jobs.ingest.submit import FileSubmission, Submitted, in_time
from tokenmill.jobs.output import Output
from tokenmill.jobs.sharding.coordination import LinesLost

FOREGROUND_S = 2.0  # before the first jobs start, so that the prefix groups of a short file are complete
_AGAIN = "run the same command again"


class IngestStopped(Exception):
    """Storing was stopped before the end of the file; submitting the file again continues."""


class Ingest:
    """Context manager that stores a job file; leaving it stops storing and closes the output.

    Entering it raises errors in the first lines of the file. Errors in later lines are raised by `sealed`, and when the
    context is left without another exception. With `whole`, the file is stored completely on entering.
    """

    def __init__(self, submission: FileSubmission, *, whole: bool = False) -> None:
        self._submission = submission
        self._whole = whole
        self._steps = submission.steps()
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "ingest")
        self._rest: Future[Submitted] | None = None  # None: everything was stored on entering
        self._output: Output | None = None
        self._found: Submitted | None = None

    @property
    def found(self) -> Submitted:
        """The batch as it was on entering."""
        if self._found is None:
            raise AssertionError("the ingest was not entered")
        return self._found

    @property
    def growing(self) -> bool:
        """Whether lines are still being stored, or storing was stopped or has failed."""
        return self._rest is not None and not (self._rest.done() and self._rest.exception() is None)

    @property
    def output(self) -> Output | None:
        """The output of the sealed batch; None while it grows, or if another process writes it."""
        return self._output

    @property
    def writes_output(self) -> bool:
        """Whether this process, and no other, may write the output."""
        return self._submission.store.claim_output(self.found.batch.id)

    async def sealed(self) -> Submitted:
        """Wait until every line is stored; raises what is wrong with the file."""
        return self.found if self._rest is None else await asyncio.wrap_future(self._rest)

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the running event loop if storing the rest of the file fails."""
        loop = asyncio.get_running_loop()

        def done(rest: Future[Submitted]) -> None:
            if isinstance(rest.exception(), TokenmillError):
                with suppress(RuntimeError):  # the loop is closed: `__exit__` raises the error
                    loop.call_soon_threadsafe(callback)

        if self._rest is not None:
            self._rest.add_done_callback(done)

    def __enter__(self) -> Self:
        try:
            self._found = self._store_first()
        except UsageError:
            self._submission.forget_refused()
            raise
        if self._rest is None:
            self._open_output()  # requeues jobs with a damaged answer
            self._found = replace(self._found, batch=self._submission.store.batch(self._found.batch.id))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.shutdown()
        if self._output is not None:
            self._output.close()
        if self._rest is None:
            return
        failure = self._rest.exception()
        if isinstance(failure, UsageError):
            self._submission.forget_refused()
        if failure is not None and kind is None and not isinstance(failure, IngestStopped):
            raise failure

    def _store_first(self) -> Submitted:
        """Store for FOREGROUND_S and until there is a pending job, or to the end of the file."""
        until_s = time.monotonic() + FOREGROUND_S
        try:
            while True:
                found = next(self._steps)
                if self._whole or found is None or time.monotonic() < until_s:
                    continue
                found = in_time(self._submission.store, found)
                if found.batch.counts.pending:
                    break
        except StopIteration as ended:
            submitted: Submitted = ended.value
            return submitted
        self._rest = self._thread.submit(self._store_rest)
        return found

    def _store_rest(self) -> Submitted:
        while not self._stopped.is_set():
            try:
                next(self._steps)
            except StopIteration as ended:
                submitted: Submitted = ended.value
                if submitted.batch.id != self.found.batch.id:
                    raise LinesLost(f"{self.found.batch.name} was removed from the store", hint=_AGAIN) from None
                self._open_output()
                return submitted
        self._steps.close()
        raise IngestStopped

    def _open_output(self) -> None:
        batch = self.found.batch
        if batch.output is not None and self.writes_output:
            self._output = Output(self._submission.store, batch)
