"""Files and batches as OpenAI's clients see them, and what clients say of them, checked. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from tokenmill.gateway.batch_records import BadLine, BatchRecord, File, HttpBatchRequest, Outcome, Page
from tokenmill.gateway.faults import Fault
from tokenmill.jobs.json_text import shown
from tokenmill.jobs.openai.call import URLS
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
LISTED_PURPOSES = (*PURPOSES, "batch_output")
LEAST_KEPT_S = 3600
MOST_KEPT_S = 2_592_000
MOST_FILES = 10_000
MOST_BATCHES = 100
USUAL_BATCHES = 20
MOST_METADATA = 16
LONGEST_KEY = 64
LONGEST_VALUE = 512
LONGEST_WINDOW_S = 366 * 86400
WINDOW = r"^[1-9][0-9]{0,8}(s|m|h|d)$"
_WINDOW = re.compile(WINDOW[1:-1])
_METADATA_QUERY = re.compile(r"metadata\[(.+)\]", re.DOTALL)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ORDER_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "priority")
T = TypeVar("T", File, BatchRecord)


# What is said to clients.


def file_body(file: File) -> dict[str, Any]:
    """A file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "expires_at": _moment(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": file.sha256,
    }


def batch_body(ticket: BatchRecord, outcome: Outcome | None) -> dict[str, Any]:
    """A batch; `outcome`: how far it is now, None: its jobs are not counted yet."""
    times = ticket.times
    end = outcome if ticket.final else None
    return {
        "id": ticket.id,
        "object": "batch",
        "endpoint": ticket.endpoint,
        "model": ticket.model,
        "errors": _errors_body(ticket.errors) if ticket.errors else None,
        "input_file_id": ticket.input_file_id,
        "completion_window": ticket.window,
        "status": ticket.status,
        "output_file_id": ticket.output_file_id if end and end.completed else None,
        "error_file_id": ticket.error_file_id if end and end.failed else None,
        "created_at": int(ticket.created_s),
        "in_progress_at": _moment(times.get("in_progress")),
        "expires_at": int(ticket.expires_s),
        "finalizing_at": _moment(times.get("finalizing")),
        "completed_at": _moment(times.get("completed")),
        "failed_at": _moment(times.get("failed")),
        "expired_at": _moment(times.get("expired")),
        "cancelling_at": _moment(times.get("cancelling")),
        "cancelled_at": _moment(times.get("cancelled")),
        "request_counts": {
            "total": outcome.total if outcome else 0,
            "completed": outcome.completed if outcome else 0,
            "failed": outcome.failed if outcome else 0,
        },
        "usage": _usage_body(outcome) if outcome else None,
        "metadata": ticket.metadata,
        "priority": ticket.priority,
    }


def _errors_body(errors: Sequence[BadLine]) -> dict[str, Any]:
    data = [{"code": bad.code, "line": bad.line, "message": bad.message, "param": bad.param} for bad in errors]
    return {"object": "list", "data": data}


def _usage_body(outcome: Outcome) -> dict[str, Any]:
    """What was computed for the batch; answers that were there before cost nothing."""
    spent = outcome.totals
    return {
        "input_tokens": spent.prompt_tokens,
        "input_tokens_details": {"cached_tokens": spent.cached_tokens},
        "output_tokens": spent.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": spent.prompt_tokens + spent.completion_tokens,
        "answers": {"computed": spent.computed, "reused": spent.reused},
    }


def list_body(found: Sequence[T], page: Page, body: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """A part of a list, out of one that is one longer where there is more."""
    part = found[: page.limit]
    return {
        "object": "list",
        "data": [body(one) for one in part],
        "first_id": part[0].id if part else None,
        "last_id": part[-1].id if part else None,
        "has_more": len(found) > page.limit,
    }


def _moment(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)


# What clients say.


def order_of(given: Mapping[str, Any]) -> HttpBatchRequest:
    """What a client wants of a batch; a Fault names the key that is wrong."""
    unknown = next((key for key in given if key not in _ORDER_KEYS), None)
    if unknown is not None:
        raise Fault(f"unknown key {shown(unknown)}", param=unknown, code="unknown_parameter")
    for key in ("input_file_id", "endpoint", "completion_window"):
        if given.get(key) is None:
            raise Fault(f"{key} is missing", param=key, code="missing_required_parameter")
        if not isinstance(given[key], str):
            _wrong(key, f"must be a text, not {shown(given[key])}")
    endpoint = given["endpoint"]
    window = given["completion_window"]
    if endpoint not in URLS:
        _wrong("endpoint", f"must be {' or '.join(URLS)}, not {shown(endpoint)}")
    return HttpBatchRequest(
        endpoint,
        window,
        window_s(window),
        given["input_file_id"],
        _metadata(given.get("metadata")),
        _priority(given.get("priority")),
        _kept(given.get("output_expires_after")),
    )


def window_s(text: str) -> float:
    """A completion window in seconds: OpenAI has 24h alone, here it is any."""
    if not _WINDOW.fullmatch(text) or not 0 < int(text[:-1]) * _SECONDS[text[-1]] <= LONGEST_WINDOW_S:
        _wrong("completion_window", f"must be a time such as 24h, 90m or 7d, up to a year, not {shown(text)}")
    return float(int(text[:-1]) * _SECONDS[text[-1]])


def _metadata(given: Any) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MOST_METADATA:
        _wrong("metadata", f"must be an object of up to {MOST_METADATA} texts")
    for key, value in given.items():
        if len(key) > LONGEST_KEY or not isinstance(value, str) or len(value) > LONGEST_VALUE:
            _wrong("metadata", f"keys are texts of up to {LONGEST_KEY} characters, values of up to {LONGEST_VALUE}")
    return given


def _priority(given: Any) -> int:
    if given is not None and (type(given) is not int or abs(given) > HIGHEST_PRIORITY):
        _wrong("priority", f"must be from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, not {shown(given)}")
    return given or 0


def _kept(given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, dict) or set(given) != {"anchor", "seconds"}:
        _wrong("output_expires_after", "must be an object with anchor and seconds")
    if type(given["seconds"]) is not int:
        _wrong("output_expires_after", f"seconds must be a whole number, not {shown(given['seconds'])}")
    return kept_s(given["anchor"], given["seconds"], "output_expires_after")


def kept_s(anchor: Any, seconds: int, param: str) -> int:
    """How long a file is kept, from when it was made."""
    if anchor != "created_at":
        _wrong(param, f'anchor must be "created_at", not {shown(anchor)}')
    if not LEAST_KEPT_S <= seconds <= MOST_KEPT_S:
        _wrong(param, f"seconds must be from {LEAST_KEPT_S} to {MOST_KEPT_S}, not {seconds}")
    return seconds


def upload_terms(fields: Mapping[str, str]) -> tuple[str, int | None]:
    """The purpose of a file, and how long it is kept, out of the fields of its form."""
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    for name in fields:
        if name not in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise Fault(f"unknown field {shown(name)}", param=name[:60], code="unknown_parameter")
    purpose = fields.get("purpose")
    if purpose is None:
        raise Fault("purpose is missing", param="purpose", code="missing_required_parameter", hint="batch for jobs")
    if purpose not in PURPOSES:
        _wrong("purpose", f"must be one of {', '.join(PURPOSES)}, not {shown(purpose)}")
    if anchor is None and seconds is None:
        return purpose, None
    if not re.fullmatch(r"[0-9]{1,9}", seconds or ""):
        _wrong("expires_after", f"seconds must be a whole number, not {shown(seconds)}")
    return purpose, kept_s(anchor, int(seconds or 0), "expires_after")


def page_of(query: Mapping[str, str], *, usual: int, most: int, known: Sequence[str]) -> Page:
    """Which part of a list a query asks for."""
    for name in query:
        if name not in known:
            raise Fault(f"unknown parameter {shown(name)}", param=name[:60], code="unknown_parameter")
    limit = query.get("limit", str(usual))
    order = query.get("order", "desc")
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:
        _wrong("limit", f"must be a whole number from 1 to {most}, not {shown(limit)}")
    if order not in ("asc", "desc"):
        _wrong("order", f"must be asc or desc, not {shown(order)}")
    return Page(int(limit), query.get("after"), newest_first=order == "desc")


def metadata_wanted(query: Mapping[str, str]) -> dict[str, str]:
    """What the metadata of listed batches is to hold, by the names in a query: `metadata[KEY]=VALUE`."""
    named = {name: found[1] for name in query if (found := _METADATA_QUERY.fullmatch(name))}
    if len(named) > MOST_METADATA:
        _wrong("metadata", f"no batch has more than {MOST_METADATA} of them")
    return {key: query[name] for name, key in named.items()}


def _wrong(key: str, what: str) -> NoReturn:
    raise Fault(f"{key}: {what}", param=key, code="invalid_value")
