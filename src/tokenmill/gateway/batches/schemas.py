"""Bodies and responses of /v1/files and /v1/batches; they validate requests and generate /openapi.json."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from tokenmill.gateway.http.openapi import NO_KEY, DocumentedAnswer, Operation, path_parameter, query_parameter
from tokenmill.jobs.openai.call import URLS
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY
from tokenmill.jobs.store.http_batches import (
    MAX_METADATA_KEY_LENGTH,
    MAX_METADATA_KEYS,
    MAX_METADATA_VALUE_LENGTH,
    MAX_PAGE_BATCHES,
    MAX_PAGE_FILES,
    WINDOW,
    Status,
)

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
LISTED_PURPOSES = (*PURPOSES, "batch_output")
MIN_LIFETIME_S = 3600
MAX_LIFETIME_S = 2_592_000

_Count = Annotated[int, Meta(ge=0)]
_Moment = Annotated[int | None, Meta(description="Unix seconds.")]
_Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY_LENGTH)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE_LENGTH)],
    ],
    Meta(max_length=MAX_METADATA_KEYS),
]


# ---- requests


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """Lifetime of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class BatchRequestObject(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Annotated[
        str, Meta(pattern=WINDOW, description="A duration such as 24h, 90m or 7d; at most a year.")
    ]
    metadata: _Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    priority: Annotated[
        Annotated[int, Meta(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] | None,
        Meta(description="Higher runs first; not in OpenAI's protocol."),
    ] = None


class FileUpload(Struct, forbid_unknown_fields=True):
    """The form of POST /v1/files."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"}, description="JSON lines for batches.")]
    purpose: Annotated[str, Meta(extra_json_schema={"enum": list(PURPOSES)})]


# ---- answers


class FileObject(TypedDict):
    """A file that was uploaded or that a batch wrote."""

    id: str
    object: Literal["file"]
    bytes: _Count
    created_at: int
    expires_at: NotRequired[_Moment]
    filename: Annotated[str, Meta(description="The client's file name.")]
    purpose: Annotated[str, Meta(extra_json_schema={"enum": list(LISTED_PURPOSES)})]
    status: Literal["processed"]
    status_details: NotRequired[None]
    sha256: NotRequired[str]


class FileList(TypedDict):
    """A page of the list of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: NotRequired[str | None]
    last_id: NotRequired[str | None]
    has_more: bool


class FileDeleted(TypedDict):
    """The response of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Annotated[bool, Meta(extra_json_schema={"const": True})]


class BatchError(TypedDict):
    """An error in an input file."""

    code: str
    message: str
    line: NotRequired[int | None]
    param: NotRequired[str | None]


class BatchErrors(TypedDict):
    """The first errors of a batch that failed."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """Number of jobs of a batch."""

    total: _Count
    completed: _Count
    failed: _Count


class BatchObject(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(URLS)})]
    model: NotRequired[str | None]
    errors: NotRequired[BatchErrors | None]
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: NotRequired[str | None]
    error_file_id: NotRequired[str | None]
    created_at: int
    in_progress_at: NotRequired[_Moment]
    expires_at: NotRequired[_Moment]
    finalizing_at: NotRequired[_Moment]
    completed_at: NotRequired[_Moment]
    failed_at: NotRequired[_Moment]
    expired_at: NotRequired[_Moment]
    cancelling_at: NotRequired[_Moment]
    cancelled_at: NotRequired[_Moment]
    request_counts: RequestCounts
    usage: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Meta(description="Tokens computed for the batch; answers reused from the store are not counted."),
        ]
    ]
    metadata: NotRequired[_Metadata | None]
    priority: NotRequired[int]


class BatchList(TypedDict):
    """A page of the list of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: NotRequired[str | None]
    last_id: NotRequired[str | None]
    has_more: bool


# ---- operations


def _limit(maximum: int) -> dict[str, Any]:
    return query_parameter("limit", "Maximum number of entries.", {"type": "integer", "minimum": 1, "maximum": maximum})


_AFTER = query_parameter("after", "The last ID of the previous page.", {"type": "string"})
_METADATA = query_parameter(
    "metadata",
    "Only batches with this metadata; not in OpenAI's protocol.",
    {"type": "object", "maxProperties": MAX_METADATA_KEYS, "additionalProperties": {"type": "string"}},
    style="deepObject",
    explode=True,
)
_FILE_ID = path_parameter("file_id")
_BATCH_ID = path_parameter("batch_id")

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/files",
        id="createFile",
        summary="Upload a file.",
        body=FileUpload,
        body_type="multipart/form-data",
        answers={200: DocumentedAnswer("The file.", FileObject)},
        errors=(400, 408, 413, 415, 507, *NO_KEY),
    ),
    Operation(
        path="/v1/files",
        id="listFiles",
        summary="List files, newest first.",
        parameters=[
            _AFTER,
            _limit(MAX_PAGE_FILES),
            query_parameter("order", "Order by time of creation.", {"enum": ["asc", "desc"]}),
            query_parameter("purpose", "Only files with this purpose.", {"enum": list(LISTED_PURPOSES)}),
        ],
        answers={200: DocumentedAnswer("A page of the list.", FileList)},
        errors=(400, *NO_KEY),
    ),
    Operation(
        path="/v1/files/{file_id}",
        id="retrieveFile",
        summary="Retrieve a file's metadata.",
        parameters=[_FILE_ID],
        answers={200: DocumentedAnswer("The file.", FileObject)},
        errors=(404, *NO_KEY),
    ),
    Operation(
        method="delete",
        path="/v1/files/{file_id}",
        id="deleteFile",
        summary="Delete a file; refused while an unfinished batch needs it.",
        parameters=[_FILE_ID],
        answers={200: DocumentedAnswer("The file is deleted.", FileDeleted)},
        errors=(404, 409, *NO_KEY),
    ),
    Operation(
        path="/v1/files/{file_id}/content",
        id="fileContent",
        summary="Download the content of a file.",
        parameters=[_FILE_ID],
        answers={200: DocumentedAnswer("The content.", media=("application/octet-stream",))},
        errors=(404, *NO_KEY),
    ),
    Operation(
        method="post",
        path="/v1/batches",
        id="createBatch",
        summary="Create a batch from a file; interactive requests have priority over it.",
        body=BatchRequestObject,
        answers={200: DocumentedAnswer("The batch.", BatchObject)},
        errors=(400, 404, 408, 413, 415, *NO_KEY),
    ),
    Operation(
        path="/v1/batches",
        id="listBatches",
        summary="List batches, newest first.",
        parameters=[_AFTER, _limit(MAX_PAGE_BATCHES), _METADATA],
        answers={200: DocumentedAnswer("A page of the list.", BatchList)},
        errors=(400, *NO_KEY),
    ),
    Operation(
        path="/v1/batches/{batch_id}",
        id="retrieveBatch",
        summary="Retrieve a batch.",
        parameters=[_BATCH_ID],
        answers={200: DocumentedAnswer("The batch.", BatchObject)},
        errors=(404, *NO_KEY),
    ),
    Operation(
        method="post",
        path="/v1/batches/{batch_id}/cancel",
        id="cancelBatch",
        summary="Cancel a batch; finished answers are kept.",
        parameters=[_BATCH_ID],
        answers={200: DocumentedAnswer("The batch.", BatchObject)},
        errors=(404, 409, *NO_KEY),
    ),
)
