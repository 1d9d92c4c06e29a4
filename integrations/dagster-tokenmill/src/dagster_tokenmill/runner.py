"""Runs the stages of a recipe as batches of a gateway; each batch is found again by its key.

    lines -> temporary file and key -> a batch with that key exists? -> wait for it -> download -> answers in line order
                                       no: upload the file, create the batch

A run that is killed, retried or repeated makes the same lines, hence the same key, and waits for the existing batch.
The end of a run does not cancel its batch, unless `cancel_on_termination` is set.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, BinaryIO, Self

from dagster_tokenmill.batch import ATTACHABLE, KEY, UNANSWERED, Batch, KeyedFile, Usage, in_order
from dagster_tokenmill.errors import (
    BatchCancelled,
    BatchExpired,
    BatchRefused,
    GatewayError,
    GatewayRefused,
    GatewayUnavailable,
)
from dagster_tokenmill.gateway import Address, Gateway, Pause, Tell
from tokenmill.recipes import Answered, Budget, End, Line, Origin, Spent

PROGRESS_S = 60.0  # between two log lines about a batch
_CANCEL_S = 10.0  # timeout of the cancel request of a terminated run
_MAX_ERRORS = 5  # invalid lines quoted in an error
_NOT_FOUND = 404
MAX_METADATA_CHARACTERS = 512  # of a value in a batch's metadata


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches are submitted and awaited."""

    model: str | None = None  # for lines that name none; None: the gateway's default
    scope: tuple[str, ...] = ()  # part of the key: the asset and the partition
    labels: Mapping[str, str] = field(default_factory=dict)  # more metadata of the batches
    window: str = "24h"
    priority: int | None = None
    poll_s: float = 2.0
    budget: Budget = Budget()  # noqa: RUF009  frozen
    cancel_on_termination: bool = False
    retry_failed: bool = True  # submit a completed batch with failed lines again; its answers are reused


@dataclass(frozen=True, slots=True)
class RunBatch:
    """A batch that a run submitted or re-attached to."""

    stage: str
    batch: Batch
    attached: bool  # the batch existed before the run
    end: End


@dataclass(frozen=True, slots=True)
class GatewayStage:
    """A finished stage; its answers can be read while the runner is open."""

    end: End
    total: int
    lines: Path
    results: tuple[Path, ...]

    def answers(self) -> Iterator[Answered]:
        """Every line with an outcome, in line order."""
        names = (str(line["custom_id"]) for line in _json_lines(self.lines))
        for result in in_order(names, *map(_json_lines, self.results)):
            error = result.get("error")
            if error is None:
                yield Answered(result["custom_id"], result["response"]["body"])
            elif error["code"] not in UNANSWERED:
                yield Answered(result["custom_id"], None, error["code"], error["message"])


class GatewayRunner:
    """A `BatchRunner` on a gateway; use it as an asynchronous context manager."""

    def __init__(
        self, address: Address, options: BatchOptions, *, tell: Tell = lambda _: None, pause: Pause = asyncio.sleep
    ) -> None:
        self.options = options
        self._tell = tell
        self._pause = pause
        self._gateway = Gateway(address, tell=tell, pause=pause)
        self._origin: Origin | None = None
        self._finished = Spent()  # by finished stages
        self._current = Spent()  # by the current stage
        self._began_s = time.monotonic()
        self._stack = AsyncExitStack()
        self.folder = Path()  # temporary folder of the run, removed when the runner is closed
        self._gone: set[str] = set()  # batches whose answers the gateway no longer has
        self.batches: list[RunBatch] = []

    async def __aenter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="tokenmill-")))
        await self._stack.enter_async_context(self._gateway)
        try:
            self._origin = await self._find_origin()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _find_origin(self) -> Origin:
        engines = await self._gateway.engines_for(self.options.model)
        if not engines:
            raise GatewayUnavailable(
                f"the gateway has no engine for the model {self.options.model or '(default)'}",
                hint="its dashboard lists the models that it serves",
            )
        first = engines[0]
        model = self.options.model or await self._gateway.model_name(first)
        return Origin(model, first.model_id, first.kind, first.build, first.context)

    @property
    def origin(self) -> Origin:
        """The model and engine that answer; raises RuntimeError before the runner is open."""
        if self._origin is None:
            raise RuntimeError("the runner is not open")
        return self._origin

    @property
    def spent(self) -> Spent:
        """Cost of this run; excludes what a batch cost before this run re-attached to it."""
        return self._finished + self._current

    async def run(self, stage: str, lines: Iterable[Line]) -> GatewayStage:
        """Run the lines as one batch and wait for it."""
        path = self.folder / f"{len(self.batches)}-lines.jsonl"
        with path.open("w+b") as file:
            keyed = KeyedFile(file, self.options.model, *self.options.scope)
            for line in lines:
                keyed.add(line)
            file.flush()
            if keyed.endpoint is None:
                return GatewayStage("finished", 0, path, ())
            used_up = self._used_up()
            while True:
                attached = await self._find(keyed.key)
                if attached is None and used_up is not None:
                    return GatewayStage(used_up, keyed.lines, path, ())
                batch = attached or await self._submit(stage, keyed, file)
                try:
                    return await self._wait(stage, batch, keyed.lines, path, attached=attached is not None)
                except GatewayRefused as error:
                    if error.status != _NOT_FOUND or attached is None:
                        raise
                    self._tell(f"the gateway no longer has {batch.id} or its files; submitting its lines again")
                    self._gone.add(batch.id)

    async def _find(self, key: str) -> Batch | None:
        """The newest batch with a key to which the run can re-attach."""
        for batch in await self._gateway.batches(metadata={KEY: key}):
            retry = self.options.retry_failed and batch.status == "completed" and batch.failed
            if batch.status in ATTACHABLE and not retry and batch.id not in self._gone:
                return batch
        return None

    async def _submit(self, stage: str, keyed: KeyedFile, file: BinaryIO) -> Batch:
        """Create a batch. Each attempt first looks for it, because the response to an earlier attempt may be lost."""
        endpoint = str(keyed.endpoint)
        key_metadata = {KEY: keyed.key}
        metadata = {**self.options.labels, "stage": stage[:MAX_METADATA_CHARACTERS], **key_metadata}
        earlier = {batch.id for batch in await self._gateway.batches(metadata=key_metadata)}

        async def submit() -> Batch:
            for batch in await self._gateway.batches(metadata=key_metadata):
                if batch.id not in earlier:
                    return batch
            name = await self._gateway.upload(file, f"{keyed.key[:16]}.jsonl")
            return await self._gateway.create(
                name, endpoint=endpoint, window=self.options.window, metadata=metadata, priority=self.options.priority
            )

        try:
            batch = await self._gateway.retrying(submit)
        except BaseException as error:
            if self._cancels_at(error):
                await self._cancel_new(key_metadata, earlier)
            raise
        self._tell(f"{stage}: submitted {keyed.lines:,} lines as {batch.id}")
        return batch

    async def _wait(self, stage: str, batch: Batch, lines: int, path: Path, *, attached: bool) -> GatewayStage:
        began = batch if attached else replace(batch, completed=0, failed=0, usage=Usage())
        since_s = time.monotonic()
        if attached:
            self._tell(f"{stage}: re-attached to {batch.id}, {batch.status}, {batch.completed:,} of {lines:,} answered")
        stopped: End | None = None
        try:
            stopped, batch = await self._until_final(stage, batch, began, since_s)
        except BaseException as error:
            if self._cancels_at(error):
                await self._cancel(batch)
            raise
        end = stopped if batch.status == "cancelled" and stopped else self._end_of(batch, lines)
        results = await self._download(batch, path)
        self._count(batch, began, since_s)
        self._finished = self.spent
        self._current = Spent()
        self.batches.append(RunBatch(stage, batch, attached, end))
        self._tell(f"{stage}: {batch.id} {batch.status}: {batch.completed:,} answered, {batch.failed:,} failed")
        return GatewayStage(end, lines, path, results)

    async def _until_final(self, stage: str, batch: Batch, began: Batch, since_s: float) -> tuple[End | None, Batch]:
        """Poll until the batch is final; the first value is the limit for which this run cancelled it."""
        stopped: End | None = None
        logged_s = time.monotonic()
        while not batch.final:
            await self._pause(self.options.poll_s)
            batch = await self._gateway.batch(batch.id)
            self._count(batch, began, since_s)
            if stopped is None and not batch.final and (stopped := self._used_up()) is not None:
                self._tell(f"{stage}: the limit of {stopped} is reached; cancelling {batch.id}, its answers are kept")
                await self._gateway.cancel(batch.id)
            if time.monotonic() - logged_s >= PROGRESS_S:
                logged_s = time.monotonic()
                self._tell(f"{stage}: {batch.id} {batch.status}, {batch.completed:,} of {batch.total:,} answered")
        return stopped, batch

    def _end_of(self, batch: Batch, lines: int) -> End:
        if batch.status == "failed":
            errors = "; ".join(batch.errors[:_MAX_ERRORS]) or "no reason given"
            raise BatchRefused(
                f"the gateway refused the lines of {batch.id}: {errors}", hint="correct these lines and run again"
            )
        if batch.status == "expired":
            raise BatchExpired(
                f"{batch.id} expired after {self.options.window}: {batch.completed:,} of {lines:,} lines answered",
                hint="answers are kept: materialise again, or set a longer window",
            )
        if batch.status == "cancelled":
            raise BatchCancelled(
                f"another client cancelled {batch.id}: {batch.completed:,} of {lines:,} lines answered",
                hint="answers are kept: materialise again to answer the other lines",
            )
        return "finished"

    async def _download(self, batch: Batch, lines: Path) -> tuple[Path, ...]:
        found = []
        for name in (batch.output_file, batch.error_file):
            if name is not None:
                found.append(lines.with_name(f"{lines.stem}-{name}"))
                await self._gateway.download(name, found[-1])
        return tuple(found)

    def _cancels_at(self, error: BaseException) -> bool:
        """Whether this error is the termination of the run and cancels its batch."""
        return self.options.cancel_on_termination and not isinstance(error, Exception)

    async def _cancel_new(self, metadata: dict[str, str], earlier: set[str]) -> None:
        """Cancel a batch that the gateway created although its response did not arrive."""
        with suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                for batch in await self._gateway.batches(metadata=metadata):
                    if batch.id not in earlier:
                        await self._cancel(batch)

    async def _cancel(self, batch: Batch) -> None:
        self._tell(f"the run is being terminated; cancelling {batch.id}, its answers are kept")
        with suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await self._gateway.cancel(batch.id)

    def _count(self, batch: Batch, began: Batch, since_s: float) -> None:
        used = batch.usage - began.usage
        self._current = Spent(
            answers=used.answers,
            reused=batch.completed - used.answers,
            failed=batch.failed - began.failed,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            completion_tokens=used.completion_tokens,
            seconds=time.monotonic() - since_s,
        )

    def _used_up(self) -> End | None:
        """The limit of the budget that is reached; None: none."""
        budget = self.options.budget
        if budget.tokens is not None and self.spent.tokens >= budget.tokens:
            return "tokens"
        if budget.seconds is not None and time.monotonic() - self._began_s >= budget.seconds:
            return "hours"
        return None


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)
