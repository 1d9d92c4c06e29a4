"""/v1/files: what was handed in and what batches gave, listed, fetched and deleted."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.gateway import uploads
from tokenmill.gateway.batch_records import File
from tokenmill.gateway.batch_repository import BatchRepository
from tokenmill.gateway.batch_view import LISTED_PURPOSES, MOST_FILES, file_body, list_body, page_of, upload_terms
from tokenmill.gateway.faults import Fault
from tokenmill.gateway.request_context import visit_of
from tokenmill.gateway.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.state import GatewayState
from tokenmill.units import KIB

_PIECE_BYTES = 256 * KIB
_KNOWN = ("after", "limit", "order", "purpose")


def file_routes(state: GatewayState, desk: Callable[[], BatchRepository]) -> list[Route]:
    """Everything about files; the desk is there while the gateway serves."""
    settings = state.config.gateway

    async def create(request: Request) -> Response:
        at = desk()
        owner = owner_of(request)
        file, draft = at.draft()
        came = await uploads.receive(
            request, draft, most_bytes=settings.max_file_bytes, timeout_s=settings.read_timeout_s
        )
        try:
            purpose, kept_s = upload_terms(came.fields)
        except Fault:
            draft.unlink(missing_ok=True)
            raise
        now_s = at.now_s()
        expires_s = None if kept_s is None else now_s + kept_s
        made = File(file, owner, came.filename, purpose, came.bytes, came.sha256, now_s, expires_s)
        return JSONResponse(file_body(await asyncio.to_thread(at.keep, made)))

    async def listed(request: Request) -> Response:
        page = page_of(request.query_params, usual=MOST_FILES, most=MOST_FILES, known=_KNOWN)
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in LISTED_PURPOSES:
            raise Fault(f"purpose: must be one of {', '.join(LISTED_PURPOSES)}", param="purpose", code="invalid_value")
        found = await asyncio.to_thread(desk().files, owner_of(request), page, purpose=purpose)
        if found is None:
            raise no_such_place(page.after)
        return JSONResponse(list_body(found, page, file_body))

    async def one(request: Request) -> Response:
        return JSONResponse(file_body(await seen(request, desk())))

    async def delete(request: Request) -> Response:
        file = await seen(request, desk())
        user = await asyncio.to_thread(desk().drop, file.id)
        if user is not None:
            raise Fault(
                f"{file.id} is needed by {user}, which is not finished",
                status=409,
                code="file_in_use",
                hint="cancel the batch, or wait for it",
            )
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def content(request: Request) -> Response:
        file = await seen(request, desk())
        return Content(desk().path(file.id), file, settings.write_timeout_s)

    return [
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files", listed, methods=["GET"]),
        Route("/v1/files/{file_id}", one, methods=["GET"]),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content, methods=["GET"]),
    ]


def owner_of(request: Request) -> str | None:
    """Whose a request is; None: it came without a key, where none is needed, and may see everything."""
    key = visit_of(request.scope).key
    return key.name if key is not None else None


def may_see(owner: str | None, of: str | None) -> bool:
    """Whether somebody may see what belongs to another: what came without a key belongs to all."""
    return owner is None or of is None or owner == of


def no_such_place(after: str | None) -> Fault:
    """A list cannot be continued after something that is not there."""
    return Fault(f"after: there is no {(after or '')[:60]!r}", param="after", code="invalid_value")


async def seen(request: Request, desk: BatchRepository) -> File:
    """The file that a path names, if whoever asks may see it."""
    name = request.path_params["file_id"]
    file = await asyncio.to_thread(desk.file, name)
    if file is None or not may_see(owner_of(request), file.owner):
        raise Fault(f"there is no file {name[:60]!r}", status=404, code="file_not_found", param="file_id")
    return file


class Content(Response):
    """The bytes of a file, piece by piece; who does not take them is dropped."""

    def __init__(self, path: Path, file: File, timeout_s: float) -> None:
        self._path = path
        self._file = file
        self._timeout_s = timeout_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            opened = await asyncio.to_thread(self._path.open, "rb")
        except OSError:
            raise Fault("the bytes of this file are gone from the disk", status=404, code="file_not_found") from None
        sending = ResponseWriter(scope, send, self._timeout_s)
        try:
            await sending.start(
                200,
                [
                    (b"content-type", b"application/octet-stream"),
                    (b"content-length", str(self._file.bytes).encode()),
                    (b"content-disposition", f"attachment; filename*=UTF-8''{quote(self._file.filename)}".encode()),
                ],
            )
            await self._pour(opened, sending)
        except SlowClient:
            visit_of(scope).error = "slow_client"
            sending.abort()
        finally:
            opened.close()

    async def _pour(self, opened: BinaryIO, sending: ResponseWriter) -> None:
        left = self._file.bytes
        while left > 0 and (piece := await asyncio.to_thread(opened.read, min(_PIECE_BYTES, left))):
            left -= len(piece)
            await sending.put(piece)
        await sending.put(b"", more=False)
