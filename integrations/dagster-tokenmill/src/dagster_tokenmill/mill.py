"""Has the lines of a recipe answered by a gateway: each stage is one batch there, found again by its key.

    lines -> spooled, key made -> a batch with that key? -> wait for it -> its files -> answers in order
                                    no: upload, create

A run that is killed, retried or started again makes the same lines and so the same key: it waits for the batch that is
there and computes nothing. Nothing is ever cancelled because a run ends, unless that was asked for.
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

from dagster_tokenmill.batch import ATTACHABLE, KEY, UNANSWERED, Batch, Keyed, Usage, in_order
from dagster_tokenmill.errors import BatchExpired, BatchRefused, BatchStopped, GatewayAway, GatewayError, Refused
from dagster_tokenmill.gateway import Address, Gateway, Pause, Tell
from tokenmill.recipes import Answered, Budget, End, Line, Origin, Spent

TELL_S = 60.0  # between two words about how far a batch is
_CANCEL_S = 10.0  # for the last word of a run that ends
_MOST_ERRORS = 5  # wrong lines that a message names
_GONE = 404
LONGEST_VALUE = 512  # characters of a value in a batch's metadata


@dataclass(frozen=True, slots=True)
class Terms:
    """How batches are handed in and waited for."""

    model: str | None = None  # for lines that name none; None: the gateway's
    scope: tuple[str, ...] = ()  # whose the lines are: part of their key
    labels: Mapping[str, str] = field(default_factory=dict)  # metadata of batches, for people
    window: str = "24h"
    priority: int | None = None
    poll_s: float = 2.0
    budget: Budget = Budget()  # noqa: RUF009  frozen
    cancel_on_termination: bool = False
    retry_failed: bool = True  # a batch that had ended with failed lines is handed in anew; its answers cost nothing


@dataclass(frozen=True, slots=True)
class Worked:
    """One batch that a run has had to do with."""

    stage: str
    batch: Batch
    attached: bool  # it was there before
    end: End


@dataclass(frozen=True, slots=True)
class GatewayRan:
    """A stage that is over; its answers can be read while the mill is open."""

    end: End
    total: int
    lines: Path
    results: tuple[Path, ...]

    def answers(self) -> Iterator[Answered]:
        """Every line that has its outcome, in the order of the lines."""
        names = (str(line["custom_id"]) for line in _json_lines(self.lines))
        for result in in_order(names, *map(_json_lines, self.results)):
            error = result.get("error")
            if error is None:
                yield Answered(result["custom_id"], result["response"]["body"])
            elif error["code"] not in UNANSWERED:
                yield Answered(result["custom_id"], None, error["code"], error["message"])


class GatewayMill:
    """A `Mill` on a gateway elsewhere; an asynchronous context."""

    def __init__(
        self, address: Address, terms: Terms, *, tell: Tell = lambda _: None, pause: Pause = asyncio.sleep
    ) -> None:
        self.terms = terms
        self._tell = tell
        self._pause = pause
        self._gateway = Gateway(address, tell=tell, pause=pause)
        self._origin: Origin | None = None
        self._before = Spent()  # by stages that are over
        self._now = Spent()  # by the stage at work
        self._began_s = time.monotonic()
        self._stack = AsyncExitStack()
        self.folder = Path()  # for files of the run; there while the mill is open
        self._gone: set[str] = set()  # batches whose answers cannot be had any more
        self.worked: list[Worked] = []

    async def __aenter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="tokenmill-")))
        await self._stack.enter_async_context(self._gateway)
        try:
            self._origin = await self._who()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _who(self) -> Origin:
        engines = await self._gateway.serving(self.terms.model)
        if not engines:
            raise GatewayAway("the gateway has no engine for this model", hint="its page shows what it serves")
        first = engines[0]
        called = self.terms.model or await self._gateway.called(first)
        return Origin(called, first.model_id, first.kind, first.build, first.context)

    @property
    def origin(self) -> Origin:
        """Who answers; known once the mill is open."""
        if self._origin is None:
            raise RuntimeError("the mill is not open")
        return self._origin

    @property
    def spent(self) -> Spent:
        """By this run: what a batch had before it was attached to is not in it."""
        return self._before + self._now

    async def run(self, stage: str, lines: Iterable[Line]) -> GatewayRan:
        """Have these lines answered."""
        path = self.folder / f"{len(self.worked)}-lines.jsonl"
        with path.open("w+b") as file:
            keyed = Keyed(file, self.terms.model, *self.terms.scope)
            for line in lines:
                keyed.add(line)
            file.flush()
            if keyed.endpoint is None:
                return GatewayRan("finished", 0, path, ())
            over = self._over_budget()
            while True:
                attached = await self._found(keyed.key)
                if attached is None and over is not None:
                    return GatewayRan(over, keyed.lines, path, ())
                batch = attached or await self._handed_in(stage, keyed, file)
                try:
                    return await self._ran(stage, batch, keyed.lines, path, attached=attached is not None)
                except Refused as error:
                    if error.status != _GONE or attached is None:
                        raise
                    self._tell(f"{batch.id} or its files are gone from the gateway; its lines are handed in again")
                    self._gone.add(batch.id)

    # One batch.

    async def _found(self, key: str) -> Batch | None:
        """The newest batch with a key that can be waited for or taken."""
        for batch in await self._gateway.batches(metadata={KEY: key}):
            anew = self.terms.retry_failed and batch.status == "completed" and batch.failed
            if batch.status in ATTACHABLE and not anew and batch.id not in self._gone:
                return batch
        return None

    async def _handed_in(self, stage: str, keyed: Keyed, file: BinaryIO) -> Batch:
        """A new batch. Where an answer was lost on the way the batch may be there: it is looked for before any try."""
        endpoint = str(keyed.endpoint)
        holding = {KEY: keyed.key}
        metadata = {**self.terms.labels, "stage": stage[:LONGEST_VALUE], **holding}
        earlier = {batch.id for batch in await self._gateway.batches(metadata=holding)}

        async def hand_in() -> Batch:
            for batch in await self._gateway.batches(metadata=holding):
                if batch.id not in earlier:
                    return batch
            name = await self._gateway.upload(file, f"{keyed.key[:16]}.jsonl")
            return await self._gateway.create(
                name, endpoint=endpoint, window=self.terms.window, metadata=metadata, priority=self.terms.priority
            )

        batch = await self._gateway.patiently(hand_in)
        self._tell(f"{stage}: {keyed.lines:,} lines handed in as {batch.id}")
        return batch

    async def _ran(self, stage: str, batch: Batch, lines: int, path: Path, *, attached: bool) -> GatewayRan:
        began = batch if attached else _nothing(batch)
        since_s = time.monotonic()
        if attached:
            self._tell(f"{stage}: re-attached to {batch.id}, {batch.status}, {batch.completed:,} of {lines:,} answered")
        stopped: End | None = None
        try:
            stopped, batch = await self._until_final(stage, batch, began, since_s)
        except BaseException as error:
            if self.terms.cancel_on_termination and not isinstance(error, Exception):
                await self._last_word(batch)
            raise
        end = stopped if batch.status == "cancelled" and stopped else self._end_of(batch, lines)
        results = await self._fetched(batch, path)
        self._count(batch, began, since_s)
        self._before = self.spent
        self._now = Spent()
        self.worked.append(Worked(stage, batch, attached, end))
        self._tell(f"{stage}: {batch.id} is {batch.status}: {batch.completed:,} answered, {batch.failed:,} not")
        return GatewayRan(end, lines, path, results)

    async def _until_final(self, stage: str, batch: Batch, began: Batch, since_s: float) -> tuple[End | None, Batch]:
        """Wait for its end; why this run itself ended it, where it did."""
        stopped: End | None = None
        told_s = time.monotonic()
        while not batch.final:
            await self._pause(self.terms.poll_s)
            batch = await self._gateway.batch(batch.id)
            self._count(batch, began, since_s)
            if stopped is None and not batch.final and (stopped := self._over_budget()) is not None:
                self._tell(f"{stage}: the budget of {stopped} is used up; {batch.id} is cancelled, its answers stay")
                await self._gateway.cancel(batch.id)
            if time.monotonic() - told_s >= TELL_S:
                told_s = time.monotonic()
                self._tell(f"{stage}: {batch.id} {batch.status}, {batch.completed:,} of {batch.total:,} answered")
        return stopped, batch

    def _end_of(self, batch: Batch, lines: int) -> End:
        if batch.status == "failed":
            named = "; ".join(batch.errors[:_MOST_ERRORS]) or "it does not say why"
            raise BatchRefused(f"the gateway refused the lines of {batch.id}: {named}", hint="mend these lines")
        if batch.status == "expired":
            raise BatchExpired(
                f"{batch.id} was not done within {self.terms.window}: {batch.completed:,} of {lines:,} answered",
                hint="what is answered is kept; materialise again, or give it a longer window",
            )
        if batch.status == "cancelled":
            raise BatchStopped(
                f"{batch.id} was cancelled with {batch.completed:,} of {lines:,} lines answered",
                hint="what is answered is kept; materialise again for the rest",
            )
        return "finished"

    async def _fetched(self, batch: Batch, lines: Path) -> tuple[Path, ...]:
        found = []
        for name in (batch.output_file, batch.error_file):
            if name is not None:
                found.append(lines.with_name(f"{lines.stem}-{name}"))
                await self._gateway.download(name, found[-1])
        return tuple(found)

    async def _last_word(self, batch: Batch) -> None:
        self._tell(f"the run is being terminated: {batch.id} is cancelled, its answers stay")
        with suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await self._gateway.cancel(batch.id)

    # What it costs.

    def _count(self, batch: Batch, began: Batch, since_s: float) -> None:
        used = batch.usage - began.usage
        self._now = Spent(
            answers=used.answers,
            reused=batch.completed - used.answers,
            failed=batch.failed - began.failed,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            completion_tokens=used.completion_tokens,
            seconds=time.monotonic() - since_s,
        )

    def _over_budget(self) -> End | None:
        budget = self.terms.budget
        if budget.tokens is not None and self.spent.tokens >= budget.tokens:
            return "tokens"
        if budget.seconds is not None and time.monotonic() - self._began_s >= budget.seconds:
            return "hours"
        return None


def _nothing(batch: Batch) -> Batch:
    """A batch before anything was done for it."""
    return replace(batch, completed=0, failed=0, usage=Usage())


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)
