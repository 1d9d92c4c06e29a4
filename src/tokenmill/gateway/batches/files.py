"""/v1/files: upload, list, retrieve, delete and download files.

    files/ID     the content of a file; the gateway chooses the ID
    files/.ID    a draft: content that is being written, or left behind by a kill

A file exists if the store has a row for it. The row is added after the content and removed before it, so a kill leaves
at most content without a row, which `FileStore.sweep` deletes.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.batches import schemas, uploads
from tokenmill.gateway.batches.schemas import LISTED_PURPOSES, MAX_LIFETIME_S, MIN_LIFETIME_S, PURPOSES
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.http.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.store.http_batches import (
    MAX_PAGE_FILES,
    RESPONSE,
    HttpBatch,
    HttpBatches,
    Page,
    StoredFile,
    new_file_id,
)
from tokenmill.jobs.store.sqlite_errors import unusable
from tokenmill.storage.atomic import sync_folder
from tokenmill.storage.json_text import shown
from tokenmill.storage.private import private_folder
from tokenmill.units import KIB

FOLDER = "files"
_PIECE_BYTES = 256 * KIB
_ORPHAN_S = 3600.0  # age after which content without a row is deleted
_LIST_PARAMETERS = ("after", "limit", "order", "purpose")
_UPLOAD_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

T = TypeVar("T", StoredFile, HttpBatch)


class FileStore:
    """The content of files in a folder, and their rows. Methods block and may be called from several threads."""

    def __init__(self, folder: Path, rows: HttpBatches) -> None:
        self._folder = folder / FOLDER
        self._rows = rows
        try:
            private_folder(self._folder)
        except OSError as error:
            raise unusable(self._folder, error) from error

    def path(self, file: str) -> Path:
        """Path of a file's content. `file` must be an ID that the gateway chose."""
        return self._folder / file

    def draft(self, file: str) -> Path:
        """Path of the content before the file exists."""
        return self._folder / f".{file}"

    def keep(self, file: StoredFile) -> StoredFile:
        """Turn the draft, whose content must be on disk, into the file; safe to repeat."""
        with suppress(FileNotFoundError):  # renamed before a kill, but without a row
            self.draft(file.id).rename(self.path(file.id))
        sync_folder(self._folder)
        self._rows.add_file(file)
        return file

    def delete(self, file: str) -> str | None:
        """Delete a file; if an unfinished batch needs it, return that batch's ID instead."""
        user = self._rows.delete_file(file)
        if user is None:
            self.path(file).unlink(missing_ok=True)
        return user

    def sweep(self) -> int:
        """Delete expired files and old content without a row; returns the number of deleted files."""
        deleted = sum(self.delete(file) is None for file in self._rows.expired_files())
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                old = time.time() - path.stat().st_mtime > _ORPHAN_S
                if old and not self._rows.has_file(path.name):
                    path.unlink()
                    deleted += 1
        return deleted


def file_routes(state: GatewayState, opened: Callable[[], tuple[HttpBatches, FileStore]]) -> list[Route]:
    """The routes of /v1/files. `opened` raises GatewayFault until the gateway serves."""
    settings = state.config.gateway

    async def create(request: Request) -> Response:
        rows, store = opened()
        file = new_file_id()
        draft = store.draft(file)
        upload = await uploads.receive(
            request, draft, max_bytes=settings.max_file_bytes, timeout_s=settings.read_timeout_s
        )
        try:
            purpose, kept_s = upload_terms(upload.fields)
        except GatewayFault:
            draft.unlink(missing_ok=True)
            raise
        now_s = rows.now_s()
        expires_s = None if kept_s is None else now_s + kept_s
        made = StoredFile(
            file, owner_of(request), upload.filename, purpose, upload.bytes, upload.sha256, now_s, expires_s
        )
        return JSONResponse(file_body(await asyncio.to_thread(store.keep, made)))

    async def listed(request: Request) -> Response:
        page = page_of(request.query_params, default=MAX_PAGE_FILES, maximum=MAX_PAGE_FILES, known=_LIST_PARAMETERS)
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in LISTED_PURPOSES:
            refuse("purpose", f"must be one of {', '.join(LISTED_PURPOSES)}")
        rows, _ = opened()
        found = await asyncio.to_thread(rows.files, owner_of(request), page, purpose=purpose)
        return JSONResponse(list_body(found, page, file_body))

    async def one(request: Request) -> Response:
        return JSONResponse(file_body((await visible(request))[0]))

    async def delete(request: Request) -> Response:
        file, store = await visible(request)
        user = await asyncio.to_thread(store.delete, file.id)
        if user is not None:
            raise GatewayFault(
                f"{file.id} is used by the unfinished batch {user}",
                status=409,
                code="file_in_use",
                hint="cancel the batch, or wait until it ends",
            )
        deleted: schemas.FileDeleted = {"id": file.id, "object": "file", "deleted": True}
        return JSONResponse(deleted)

    async def content(request: Request) -> Response:
        file, store = await visible(request)
        return _Content(store.path(file.id), file, settings.write_timeout_s)

    async def visible(request: Request) -> tuple[StoredFile, FileStore]:
        rows, store = opened()
        return await visible_file(request, rows, request.path_params["file_id"], param="file_id"), store

    return [
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files", listed, methods=["GET"]),
        Route("/v1/files/{file_id}", one, methods=["GET"]),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content, methods=["GET"]),
    ]


def owner_of(request: Request) -> str | None:
    """The owner of objects that the request creates; None if no key is required: such clients see all objects."""
    key = context_of(request.scope).key
    return key.owner if key is not None else None


def may_see(owner: str | None, of: str | None) -> bool:
    """Whether `owner` may see a resource of the owner `of`; resources created without a key are visible to all."""
    return owner is None or of is None or owner == of


async def visible_file(request: Request, rows: HttpBatches, file: str, *, param: str) -> StoredFile:
    """A file that the client may see; raises GatewayFault with status 404 otherwise."""
    found = await asyncio.to_thread(rows.file, file)
    if found is None or found.purpose == RESPONSE or not may_see(owner_of(request), found.owner):
        raise no_file(file, param=param)
    return found


def no_file(file: str, *, param: str) -> GatewayFault:
    """The error for a file that does not exist or that the client may not see."""
    return GatewayFault(f"unknown file {file[:60]!r}", status=404, code="file_not_found", param=param)


def file_body(file: StoredFile) -> schemas.FileObject:
    """A file as JSON."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "expires_at": moment(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": file.sha256,
    }


def list_body(found: Sequence[T] | None, page: Page, body: Callable[[T], Mapping[str, Any]]) -> dict[str, Any]:
    """A page of files or batches. `found` has one entry more if there are more pages; None: `page.after` is unknown."""
    if found is None:
        refuse("after", f"unknown ID {(page.after or '')[:60]!r}")
    part = found[: page.limit]
    return {
        "object": "list",
        "data": [body(one) for one in part],
        "first_id": part[0].id if part else None,
        "last_id": part[-1].id if part else None,
        "has_more": len(found) > page.limit,
    }


def moment(time_s: float | None) -> int | None:
    """A time in whole seconds, as in OpenAI's JSON."""
    return None if time_s is None else int(time_s)


def page_of(query: Mapping[str, str], *, default: int, maximum: int, known: Sequence[str]) -> Page:
    """The page that a query requests; raises GatewayFault for parameters that are not in `known`."""
    for name in query:
        if name not in known:
            raise GatewayFault(f"unknown parameter {shown(name)}", param=name[:60], code="unknown_parameter")
    limit = query.get("limit", str(default))
    order = query.get("order", "desc")
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= maximum:
        refuse("limit", f"must be a whole number from 1 to {maximum}, not {shown(limit)}")
    if order not in ("asc", "desc"):
        refuse("order", f"must be asc or desc, not {shown(order)}")
    return Page(int(limit), query.get("after"), newest_first=order == "desc")


def upload_terms(fields: Mapping[str, str]) -> tuple[str, int | None]:
    """The purpose of an upload and its lifetime in seconds, from the form fields."""
    for name in fields:
        if name not in _UPLOAD_FIELDS:
            raise GatewayFault(f"unknown field {shown(name)}", param=name[:60], code="unknown_parameter")
    purpose = fields.get("purpose")
    if purpose is None:
        raise GatewayFault(
            "purpose is missing",
            param="purpose",
            code="missing_required_parameter",
            hint='use "batch" for a file of jobs',
        )
    if purpose not in PURPOSES:
        refuse("purpose", f"must be one of {', '.join(PURPOSES)}, not {shown(purpose)}")
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, None
    if not re.fullmatch(r"[0-9]{1,9}", seconds or ""):
        refuse("expires_after", f"seconds must be a whole number, not {shown(seconds)}")
    return purpose, lifetime_s(anchor, int(seconds or 0), "expires_after")


def lifetime_s(anchor: Any, seconds: int, param: str) -> int:
    """Validate the lifetime of a file, which starts at its creation."""
    if anchor != "created_at":
        refuse(param, f'anchor must be "created_at", not {shown(anchor)}')
    if not MIN_LIFETIME_S <= seconds <= MAX_LIFETIME_S:
        refuse(param, f"seconds must be from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}, not {seconds}")
    return seconds


def refuse(param: str, reason: str) -> NoReturn:
    """Raise GatewayFault for an invalid parameter."""
    raise GatewayFault(f"{param}: {reason}", param=param, code="invalid_value")


class _Content(Response):
    """Streams the content of a file; a client that does not read is disconnected."""

    def __init__(self, path: Path, file: StoredFile, timeout_s: float) -> None:
        self._path = path
        self._file = file
        self._timeout_s = timeout_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            opened = await asyncio.to_thread(self._path.open, "rb")
        except OSError:
            raise GatewayFault(
                "the content of this file is missing on disk", status=404, code="file_not_found"
            ) from None
        writer = ResponseWriter(scope, send, self._timeout_s)
        try:
            await writer.start(
                200,
                [
                    (b"content-type", b"application/octet-stream"),
                    (b"content-length", str(self._file.bytes).encode()),
                    (b"content-disposition", f"attachment; filename*=UTF-8''{quote(self._file.filename)}".encode()),
                ],
            )
            await self._send_pieces(opened, writer)
        except SlowClient:
            context_of(scope).error = "slow_client"
            writer.abort()
        finally:
            opened.close()

    async def _send_pieces(self, opened: BinaryIO, writer: ResponseWriter) -> None:
        left = self._file.bytes
        while left > 0 and (piece := await asyncio.to_thread(opened.read, min(_PIECE_BYTES, left))):
            left -= len(piece)
            await writer.put(piece)
        await writer.put(b"", more=False)
