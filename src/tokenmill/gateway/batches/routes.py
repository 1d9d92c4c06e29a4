"""/v1/batches: create, list, retrieve and cancel batches; an `HttpBatchRunner` runs them while the gateway serves."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.gateway.batches import schemas
from tokenmill.gateway.batches.files import (
    file_routes,
    list_body,
    may_see,
    moment,
    no_file,
    owner_of,
    page_of,
    refuse,
    visible_file,
)
from tokenmill.gateway.batches.schemas import OPERATIONS, BatchRequestObject
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.openapi import RouteGroup
from tokenmill.gateway.http.request import parse_body, read_body
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.openai.validation import validate
from tokenmill.jobs.store.http_batches import (
    DEFAULT_PAGE_BATCHES,
    MAX_METADATA_KEYS,
    MAX_PAGE_BATCHES,
    MAX_WINDOW_S,
    WINDOW,
    HttpBatch,
    HttpBatchRequest,
    Outcome,
    RefusedLine,
)
from tokenmill.storage.json_text import shown

_WINDOW = re.compile(WINDOW[1:-1])
_METADATA_QUERY = re.compile(r"metadata\[(.+)\]", re.DOTALL)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def route_group(state: GatewayState, service: BatchService) -> RouteGroup:
    """Routes for files and batches, and the runner that executes batches while the gateway serves."""
    return RouteGroup(_routes(state, service), OPERATIONS, lifespan=service.serving)


def _routes(state: GatewayState, service: BatchService) -> list[Route]:
    settings = state.config.gateway

    async def create(request: Request) -> Response:
        wanted = batch_request(await parse_body(await read_body(request, settings)))
        rows = service.rows()
        file = await visible_file(request, rows, wanted.input_file_id, param="input_file_id")
        if file.purpose != "batch":
            raise GatewayFault(
                f"{file.id} has the purpose {file.purpose!r}, not 'batch'",
                param="input_file_id",
                code="invalid_value",
                hint='upload it with purpose "batch"',
            )
        batch = await asyncio.to_thread(rows.create, wanted, owner_of(request))
        if batch is None:
            raise no_file(wanted.input_file_id, param="input_file_id")
        service.wake()
        return JSONResponse(batch_body(batch))

    async def listed(request: Request) -> Response:
        query = request.query_params
        metadata = metadata_wanted(query)
        known = ("after", "limit", *(f"metadata[{key}]" for key in metadata))
        page = page_of(query, default=DEFAULT_PAGE_BATCHES, maximum=MAX_PAGE_BATCHES, known=known)
        found = await asyncio.to_thread(service.rows().batches, owner_of(request), page, metadata=metadata)
        return JSONResponse(list_body(found, page, batch_body))

    async def one(request: Request) -> Response:
        return JSONResponse(batch_body(await visible(request)))

    async def cancel(request: Request) -> Response:
        batch = await visible(request)
        cancelled = await asyncio.to_thread(service.rows().cancel, batch.id)
        batch = await visible(request)
        if not cancelled and batch.status not in ("cancelling", "cancelled"):
            raise GatewayFault(
                f"{batch.id} cannot be cancelled: it is {batch.status}",
                status=409,
                code="batch_not_cancellable",
            )
        service.wake()
        return JSONResponse(batch_body(batch))

    async def visible(request: Request) -> HttpBatch:
        name = request.path_params["batch_id"]
        batch = await asyncio.to_thread(service.rows().batch, name)
        if batch is None or not may_see(owner_of(request), batch.owner):
            raise GatewayFault(f"unknown batch {name[:60]!r}", status=404, code="batch_not_found", param="batch_id")
        return batch

    return [
        *file_routes(state, service.files),
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listed, methods=["GET"]),
        Route("/v1/batches/{batch_id}", one, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]


# Responses.


def batch_body(batch: HttpBatch) -> schemas.BatchObject:
    """A batch as JSON."""
    outcome = batch.outcome
    written = outcome if batch.final else None
    ended_at = {batch.status: moment(batch.ended_s)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors_body(batch.errors) if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if written and written.completed else None,
        "error_file_id": batch.error_file_id if written and written.failed else None,
        "created_at": int(batch.created_s),
        "in_progress_at": moment(batch.in_progress_s),
        "expires_at": int(batch.expires_s),
        "finalizing_at": moment(batch.finalizing_s),
        "completed_at": ended_at.get("completed"),
        "failed_at": ended_at.get("failed"),
        "expired_at": ended_at.get("expired"),
        "cancelling_at": moment(batch.cancelling_s),
        "cancelled_at": ended_at.get("cancelled"),
        "request_counts": {
            "total": outcome.total if outcome else 0,
            "completed": outcome.completed if outcome else 0,
            "failed": outcome.failed if outcome else 0,
        },
        "usage": _usage_body(outcome) if outcome else None,
        "metadata": None if batch.metadata is None else dict(batch.metadata),
        "priority": batch.priority,
    }


def _errors_body(errors: Sequence[RefusedLine]) -> schemas.BatchErrors:
    data: list[schemas.BatchError] = [
        {"code": bad.code, "line": bad.line, "message": bad.message, "param": bad.param} for bad in errors
    ]
    return {"object": "list", "data": data}


def _usage_body(outcome: Outcome) -> dict[str, Any]:
    """Tokens computed for the batch; answers reused from the store are not counted."""
    totals = outcome.totals
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "answers": {"computed": totals.computed, "reused": totals.reused},
    }


# Requests.


def batch_request(given: Mapping[str, Any]) -> HttpBatchRequest:
    """Validate the body of POST /v1/batches; raises RequestRefused or GatewayFault with the name of the invalid key."""
    present = {key: value for key, value in given.items() if value is not None}
    wanted = validate(BatchRequestObject, present, code="invalid_value", missing_code="missing_required_parameter")
    lifetime = wanted.output_expires_after
    return HttpBatchRequest(
        wanted.endpoint,
        wanted.completion_window,
        window_s(wanted.completion_window),
        wanted.input_file_id,
        wanted.metadata,
        wanted.priority or 0,
        None if lifetime is None else lifetime.seconds,
    )


def window_s(text: str) -> float:
    """A completion window in seconds. OpenAI allows only 24h, the gateway any duration up to a year."""
    if not _WINDOW.fullmatch(text) or not 0 < int(text[:-1]) * _SECONDS[text[-1]] <= MAX_WINDOW_S:
        refuse("completion_window", f"must be a duration such as 24h, 90m or 7d, at most a year, not {shown(text)}")
    return float(int(text[:-1]) * _SECONDS[text[-1]])


def metadata_wanted(query: Mapping[str, str]) -> dict[str, str]:
    """The metadata filter of a list, from query parameters `metadata[KEY]=VALUE`."""
    named = {name: found[1] for name in query if (found := _METADATA_QUERY.fullmatch(name))}
    if len(named) > MAX_METADATA_KEYS:
        refuse("metadata", f"must have at most {MAX_METADATA_KEYS} entries")
    return {key: query[name] for name, key in named.items()}
