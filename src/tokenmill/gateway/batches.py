"""/v1/batches: files of jobs handed in by HTTP, worked on by the batch room beside everything else."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.errors import StoreError, UsageError
from tokenmill.gateway import bodies
from tokenmill.gateway.batch_paths import PATHS, SCHEMAS
from tokenmill.gateway.batch_records import BatchRecord, Outcome, of_counts
from tokenmill.gateway.batch_repository import BatchRepository
from tokenmill.gateway.batch_view import (
    MOST_BATCHES,
    USUAL_BATCHES,
    batch_body,
    list_body,
    metadata_wanted,
    order_of,
    page_of,
)
from tokenmill.gateway.faults import Fault
from tokenmill.gateway.files import file_routes, may_see, no_such_place, owner_of
from tokenmill.gateway.parts import Part
from tokenmill.gateway.runner import TICK_S, BatchRunner
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.reader import Reader

FOLDER = "batches"  # in the state folder: where `tokenmill run` and `tokenmill status` have theirs


def part(state: GatewayState, *, tick_s: float = TICK_S, clock: Callable[[], float] = time.time) -> Part:
    """Files, batches, and who works on them while the gateway serves."""
    room = Room(state, tick_s, clock)
    return Part(batch_routes(state, room), PATHS, SCHEMAS, alongside=room.opened)


@dataclass(slots=True)
class Room:
    """What requests and the runner share; open while the gateway serves."""

    state: GatewayState
    tick_s: float
    clock: Callable[[], float]
    _desk: BatchRepository | None = None
    _runner: BatchRunner | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the desk and work until the gateway has stopped."""
        folder = self.state.state_path / FOLDER
        self._desk = await asyncio.to_thread(lambda: BatchRepository(folder, clock=self.clock))
        self._runner = BatchRunner(self.state, self._desk, folder, tick_s=self.tick_s, clock=self.clock)
        self._runner.start()
        try:
            yield
        finally:
            await self._runner.stop()
            self._desk.close()
            self._desk = self._runner = None

    def desk(self) -> BatchRepository:
        """It, while it is open."""
        if self._desk is None:
            raise Fault("files and batches are not served yet", status=503, code="starting", retry_after_s=1.0)
        return self._desk

    def wake(self) -> None:
        """There is something for the runner."""
        if self._runner is not None:
            self._runner.wake()

    async def bodies(self, tickets: Sequence[BatchRecord]) -> list[dict[str, Any]]:
        """Batches as clients see them, counted as of now."""
        return await asyncio.to_thread(self._bodies, tickets)

    def _bodies(self, tickets: Sequence[BatchRecord]) -> list[dict[str, Any]]:
        live = self._counted([ticket for ticket in tickets if ticket.outcome is None])
        made = []
        for ticket in tickets:
            outcome = ticket.outcome or live.get(ticket.id)
            made.append(batch_body(ticket, outcome))
        return made

    def _counted(self, tickets: Sequence[BatchRecord]) -> dict[str, Outcome]:
        """From a connection of its own, so that nobody waits for who writes."""
        found: dict[str, Outcome] = {}
        if not tickets:
            return found
        try:
            with Reader(self.state.state_path / FOLDER) as reader:
                for ticket in tickets:
                    try:
                        batch = reader.named(ticket.id)
                    except UsageError:
                        continue  # its file has not been read yet
                    found[ticket.id] = of_counts(batch.counts, batch.totals)
        except StoreError:  # there is none yet, or it is being made
            return found
        return found


def batch_routes(state: GatewayState, room: Room) -> list[Route]:
    """Everything about files and batches."""
    settings = state.config.gateway

    async def create(request: Request) -> Response:
        body = await bodies.read(request, most_bytes=settings.max_body_bytes, timeout_s=settings.read_timeout_s)
        order = order_of(await bodies.parse(body))
        owner = owner_of(request)
        desk = room.desk()
        file = await asyncio.to_thread(desk.file, order.input_file_id)
        if file is None or not may_see(owner, file.owner):
            raise _no_file(order.input_file_id)
        if file.purpose != "batch":
            raise Fault(
                f"{file.id} was handed in for {file.purpose}, not for batch",
                param="input_file_id",
                code="invalid_value",
                hint='upload it with purpose "batch"',
            )
        ticket = await asyncio.to_thread(desk.take, order, owner)
        if ticket is None:
            raise _no_file(order.input_file_id)
        room.wake()
        return JSONResponse((await room.bodies([ticket]))[0])

    async def listed(request: Request) -> Response:
        query = request.query_params
        wanted = metadata_wanted(query)
        known = ("after", "limit", *(f"metadata[{key}]" for key in wanted))
        page = page_of(query, usual=USUAL_BATCHES, most=MOST_BATCHES, known=known)
        found = await asyncio.to_thread(room.desk().tickets, owner_of(request), page, metadata=wanted)
        if found is None:
            raise no_such_place(page.after)
        made = dict(zip((ticket.id for ticket in found), await room.bodies(found), strict=True))
        return JSONResponse(list_body(found, page, lambda ticket: made[ticket.id]))

    async def one(request: Request) -> Response:
        return JSONResponse((await room.bodies([await seen(request)]))[0])

    async def cancel(request: Request) -> Response:
        ticket = await seen(request)
        desk = room.desk()
        moved = await asyncio.to_thread(desk.move, ticket.id, "cancelling", since=("validating", "in_progress"))
        ticket = await seen(request)
        if not moved and ticket.status not in ("cancelling", "cancelled"):
            raise Fault(
                f"{ticket.id} is {ticket.status}: there is nothing left to cancel",
                status=409,
                code="batch_not_cancellable",
            )
        room.wake()
        return JSONResponse((await room.bodies([ticket]))[0])

    async def seen(request: Request) -> BatchRecord:
        name = request.path_params["batch_id"]
        ticket = await asyncio.to_thread(room.desk().ticket, name)
        if ticket is None or not may_see(owner_of(request), ticket.owner):
            raise Fault(f"there is no batch {name[:60]!r}", status=404, code="batch_not_found", param="batch_id")
        return ticket

    return [
        *file_routes(state, room.desk),
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listed, methods=["GET"]),
        Route("/v1/batches/{batch_id}", one, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]


def _no_file(file: str) -> Fault:
    return Fault(f"there is no file {file[:60]!r}", status=404, code="file_not_found", param="input_file_id")
