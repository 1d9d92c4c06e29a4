"""Files and batches in the words of OpenAPI."""

from collections.abc import Mapping
from typing import Any

from tokenmill.gateway.files import LEAST_KEPT_S, LISTED_PURPOSES, MOST_KEPT_S, PURPOSES
from tokenmill.gateway.openapi import NO_KEY, NOT_FOUND, json_answer, json_body, ref, refusals
from tokenmill.jobs.http_batches import (
    LONGEST_KEY,
    LONGEST_VALUE,
    MOST_BATCHES,
    MOST_FILES,
    MOST_METADATA,
    STATUSES,
    WINDOW,
)
from tokenmill.jobs.openai.call import URLS
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY

_WHEN = {"type": ["integer", "null"], "description": "Unix seconds."}
_ID = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_METADATA = {
    "type": ["object", "null"],
    "maxProperties": MOST_METADATA,
    "propertyNames": {"maxLength": LONGEST_KEY},
    "additionalProperties": {"type": "string", "maxLength": LONGEST_VALUE},
}
_KEPT = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "additionalProperties": False,
    "properties": {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MOST_KEPT_S},
    },
}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _list_of(schema: str) -> dict[str, Any]:
    return _object(
        ("object", "data", "has_more"),
        object={"const": "list"},
        data={"type": "array", "items": ref(schema)},
        first_id=_ID,
        last_id=_ID,
        has_more={"type": "boolean"},
    )


SCHEMAS: Mapping[str, Any] = {
    "File": _object(
        ("id", "object", "bytes", "created_at", "filename", "purpose", "status"),
        id={"type": "string"},
        object={"const": "file"},
        bytes=_COUNT,
        created_at={"type": "integer"},
        expires_at=_WHEN,
        filename={"type": "string", "description": "What the client called it."},
        purpose={"enum": list(LISTED_PURPOSES)},
        status={"const": "processed"},
        status_details={"type": "null"},
        sha256={"type": "string"},
    ),
    "FileList": _list_of("File"),
    "FileUpload": {
        "type": "object",
        "required": ["file", "purpose"],
        "additionalProperties": False,
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "For batches: lines of JSON."},
            "purpose": {"enum": list(PURPOSES)},
        },
    },
    "FileDeleted": _object(
        ("id", "object", "deleted"), id={"type": "string"}, object={"const": "file"}, deleted={"const": True}
    ),
    "BatchRequest": {
        "type": "object",
        "required": ["input_file_id", "endpoint", "completion_window"],
        "additionalProperties": False,
        "properties": {
            "input_file_id": {"type": "string"},
            "endpoint": {"enum": list(URLS)},
            "completion_window": {"type": "string", "pattern": WINDOW, "description": "24h, 90m, 7d: a year at most."},
            "metadata": _METADATA,
            "output_expires_after": {"anyOf": [_KEPT, {"type": "null"}]},
            "priority": {
                "type": ["integer", "null"],
                "minimum": -HIGHEST_PRIORITY,
                "maximum": HIGHEST_PRIORITY,
                "description": "Higher goes first; not in OpenAI's protocol.",
            },
        },
    },
    "Batch": _object(
        ("id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", "request_counts"),
        id={"type": "string"},
        object={"const": "batch"},
        endpoint={"enum": list(URLS)},
        model=_ID,
        errors={"anyOf": [ref("BatchErrors"), {"type": "null"}]},
        input_file_id={"type": "string"},
        completion_window={"type": "string"},
        status={"enum": list(STATUSES)},
        output_file_id=_ID,
        error_file_id=_ID,
        created_at={"type": "integer"},
        in_progress_at=_WHEN,
        expires_at=_WHEN,
        finalizing_at=_WHEN,
        completed_at=_WHEN,
        failed_at=_WHEN,
        expired_at=_WHEN,
        cancelling_at=_WHEN,
        cancelled_at=_WHEN,
        request_counts=_object(("total", "completed", "failed"), total=_COUNT, completed=_COUNT, failed=_COUNT),
        usage={
            "anyOf": [{"type": "object"}, {"type": "null"}],
            "description": "What was computed for it: answers that were there before cost nothing.",
        },
        metadata=_METADATA,
        priority={"type": "integer"},
    ),
    "BatchErrors": _object(
        ("object", "data"),
        object={"const": "list"},
        data={
            "type": "array",
            "items": _object(
                ("code", "message"),
                code={"type": "string"},
                message={"type": "string"},
                line={"type": ["integer", "null"]},
                param=_ID,
            ),
        },
    ),
    "BatchList": _list_of("Batch"),
}


def _query(name: str, schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _operation(name: str, summary: str, answers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"operationId": name, "summary": summary, **more, "responses": {**answers, **NO_KEY}}


_AFTER = _query("after", {"type": "string"}, "The last one of the part before.")
_HOLDING = {
    **_query(
        "metadata",
        {"type": "object", "maxProperties": MOST_METADATA, "additionalProperties": {"type": "string"}},
        "Only batches whose metadata holds these; not in OpenAI's protocol.",
    ),
    "style": "deepObject",
    "explode": True,
}
_FORM = {"required": True, "content": {"multipart/form-data": {"schema": ref("FileUpload")}}}
_BYTES = {
    "description": "Its bytes.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
_WRONG = refusals(400)

PATHS: Mapping[str, Any] = {
    "/v1/files": {
        "post": _operation(
            "createFile",
            "Hand in a file.",
            {"200": json_answer("File", "It."), **refusals(400, 408, 413, 415, 507)},
            requestBody=_FORM,
        ),
        "get": _operation(
            "listFiles",
            "Files, the newest first.",
            {"200": json_answer("FileList", "A part of them."), **_WRONG},
            parameters=[
                _AFTER,
                _query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_FILES}, "How many at most."),
                _query("order", {"enum": ["asc", "desc"]}, "By when they came."),
                _query("purpose", {"enum": list(LISTED_PURPOSES)}, "Only these."),
            ],
        ),
    },
    "/v1/files/{file_id}": {
        "get": _operation(
            "retrieveFile", "One file.", {"200": json_answer("File", "It."), **NOT_FOUND}, parameters=[_path("file_id")]
        ),
        "delete": _operation(
            "deleteFile",
            "Delete a file that no unfinished batch needs.",
            {"200": json_answer("FileDeleted", "It is gone."), **NOT_FOUND, **refusals(409)},
            parameters=[_path("file_id")],
        ),
    },
    "/v1/files/{file_id}/content": {
        "get": _operation(
            "fileContent", "The bytes of a file.", {"200": _BYTES, **NOT_FOUND}, parameters=[_path("file_id")]
        ),
    },
    "/v1/batches": {
        "post": _operation(
            "createBatch",
            "Have the jobs of a file worked on behind interactive requests.",
            {"200": json_answer("Batch", "It."), **refusals(400, 404, 408, 413, 415)},
            requestBody=json_body("BatchRequest"),
        ),
        "get": _operation(
            "listBatches",
            "Batches, the newest first.",
            {"200": json_answer("BatchList", "A part of them."), **_WRONG},
            parameters=[
                _AFTER,
                _query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_BATCHES}, "How many at most."),
                _HOLDING,
            ],
        ),
    },
    "/v1/batches/{batch_id}": {
        "get": _operation(
            "retrieveBatch",
            "One batch.",
            {"200": json_answer("Batch", "It."), **NOT_FOUND},
            parameters=[_path("batch_id")],
        ),
    },
    "/v1/batches/{batch_id}/cancel": {
        "post": _operation(
            "cancelBatch",
            "Cancel a batch: what is answered stays.",
            {"200": json_answer("Batch", "It."), **NOT_FOUND, **refusals(409)},
            parameters=[_path("batch_id")],
        ),
    },
}
