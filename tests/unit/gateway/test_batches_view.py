"""Requests and responses of files and batches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Batch, FileObject

from tokenmill.errors import RequestRefused
from tokenmill.gateway.batches.files import file_body, list_body, page_of, upload_terms
from tokenmill.gateway.batches.routes import batch_body, batch_request, metadata_wanted, window_s
from tokenmill.gateway.http.faults import GatewayFault, param_of, status_of
from tokenmill.jobs.models import BatchTotals
from tokenmill.jobs.store.http_batches import (
    FINAL,
    HttpBatch,
    HttpBatchRequest,
    Outcome,
    Page,
    RefusedLine,
    Status,
    StoredFile,
)

GIVEN = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
BATCH = HttpBatch(
    id="batch_1",
    owner=None,
    endpoint="/v1/chat/completions",
    completion_window="24h",
    input_file_id="file-1",
    metadata={"a": "b"},
    priority=0,
    created_s=10.7,
    expires_s=100.2,
    output_file_id="file-o",
    error_file_id="file-e",
    output_kept_s=None,
    model=None,
    status="validating",
    in_progress_s=None,
    finalizing_s=None,
    cancelling_s=None,
    ended_s=None,
    errors=(),
    outcome=None,
)


def test_a_request() -> None:
    kept = {"anchor": "created_at", "seconds": 3600}
    assert batch_request(GIVEN) == HttpBatchRequest("/v1/chat/completions", "24h", 86400.0, "file-1")
    more = batch_request({**GIVEN, "metadata": {"a": "b"}, "output_expires_after": kept, "priority": -5})
    assert (more.metadata, more.output_kept_s, more.priority) == ({"a": "b"}, 3600, -5)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "999999999d"}, "completion_window"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"priority": True}, "priority"),
        ({"priority": 5000}, "priority"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": "5"}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "later", "seconds": 3600}}, "output_expires_after"),
        ({"prioritee": 1}, "prioritee"),
    ],
)
def test_requests_that_are_wrong(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises((GatewayFault, RequestRefused)) as caught:
        batch_request({**GIVEN, **wrong})
    assert param_of(caught.value) == param
    assert status_of(caught.value) == 400
    missing = wrong.get(param) is None
    unknown = param not in (*GIVEN, "metadata", "priority", "output_expires_after")
    code = "missing_required_parameter" if missing else "unknown_parameter" if unknown else "invalid_value"
    assert caught.value.code == code


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86400), ("90m", 5400), ("2s", 2), ("7d", 604800)])
def test_windows(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


def test_terms_of_an_upload() -> None:
    assert upload_terms({"purpose": "batch"}) == ("batch", None)
    terms = {"purpose": "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    assert upload_terms(terms) == ("user_data", 7200)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"purpose": "batch_output"},
        {"purpose": "batch", "extra": "1"},
        {"purpose": "batch", "expires_after[seconds]": "7200"},
        {"purpose": "batch", "expires_after[anchor]": "created_at"},
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "-1"},
    ],
)
def test_terms_that_are_wrong(fields: dict[str, str]) -> None:
    with pytest.raises(GatewayFault):
        upload_terms(fields)


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"page": "2"}])
def test_pages_that_are_wrong(query: dict[str, str]) -> None:
    with pytest.raises(GatewayFault) as caught:
        page_of(query, default=20, maximum=100, known=("after", "limit", "order"))
    assert caught.value.param in query


def test_pages() -> None:
    known = ("after", "limit", "order")
    assert page_of({}, default=20, maximum=100, known=known) == Page(20)
    asked = page_of({"limit": "3", "after": "a", "order": "asc"}, default=20, maximum=100, known=known)
    assert asked == Page(3, "a", newest_first=False)
    files = [StoredFile(f"file-{number}", None, "f", "batch", 1, "", 5.9) for number in range(3)]
    part = list_body(files, Page(2), file_body)
    assert (part["first_id"], part["last_id"], part["has_more"]) == ("file-0", "file-1", True)
    assert list_body(files[:0], Page(2), file_body)["first_id"] is None


@pytest.mark.parametrize(
    ("status", "done", "failed", "output", "errors"),
    [
        ("in_progress", 1, 1, None, None),
        ("completed", 2, 0, "file-o", None),
        ("completed", 1, 1, "file-o", "file-e"),
        ("expired", 0, 2, None, "file-e"),
        ("failed", None, None, None, None),
    ],
)
def test_a_batch_names_the_files_that_are_there(
    status: Status, done: int | None, failed: int | None, output: str | None, errors: str | None
) -> None:
    outcome = None if done is None or failed is None else Outcome(done, failed, 2, BatchTotals(1, 1, 10, 4, 6, 0.5))
    ended_s = 12.5 if status in FINAL else None
    batch = replace(BATCH, status=status, ended_s=ended_s, errors=(RefusedLine("c", "m", 3),), outcome=outcome)
    body: Mapping[str, Any] = batch_body(batch)
    assert (body["output_file_id"], body["error_file_id"]) == (output, errors)
    seen = Batch.model_validate(body, strict=True)  # as OpenAI's client has it
    assert {name for name in FINAL if body[f"{name}_at"] == 12} == ({status} if ended_s else set())
    assert seen.request_counts is not None
    assert seen.request_counts.total == (2 if outcome else 0)
    assert (seen.usage is None) == (outcome is None)
    assert seen.errors is not None
    assert seen.errors.data is not None
    assert seen.errors.data[0].line == 3


def test_a_file_as_the_client_reads_it() -> None:
    seen = FileObject.model_validate(
        file_body(StoredFile("file-1", "eva", "f", "batch", 5, "sum", 9.9, 20.2)), strict=True
    )
    assert (seen.created_at, seen.expires_at, seen.bytes) == (9, 20, 5)


def test_metadata_in_a_query() -> None:
    assert metadata_wanted({"limit": "5", "metadata[a]": "b", "metadata[x[y]]": ""}) == {"a": "b", "x[y]": ""}
    assert metadata_wanted({"metadata": "a", "metadata[]": "b", "metadata[a": "c"}) == {}
    with pytest.raises(GatewayFault) as caught:
        metadata_wanted({f"metadata[{number}]": "" for number in range(17)})
    assert caught.value.param == "metadata"
