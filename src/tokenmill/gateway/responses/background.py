"""Background responses: each runs as a batch of one job, so it survives restarts; interactive requests go first."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.gateway.responses.stored import KEPT_S, StoredResponse, StoredResponses
from tokenmill.jobs.openai.call import check
from tokenmill.jobs.openai.responses.items import Item, items_of
from tokenmill.jobs.openai.responses.request import check_response
from tokenmill.jobs.store.http_batches import HttpBatchRequest, new_file_id
from tokenmill.storage.json_text import encode

_URL = "/v1/responses"
_WINDOW, _WINDOW_S = "7d", 7 * 86400.0
_NOT_IN_JOBS = ("background", "previous_response_id", "store", "stream", "stream_options")


def job_body(body: Mapping[str, Any], history: Sequence[Item]) -> dict[str, Any]:
    """The body of the job, with the items of the previous responses; raises RequestRefused if it is invalid."""
    check_response(body)
    kept = {key: value for key, value in body.items() if key not in _NOT_IN_JOBS and value is not None}
    job = {**kept, "input": [*history, *items_of(body["input"])]}
    check("responses", job)
    return job


def start(responses: StoredResponses, response: StoredResponse, job: Mapping[str, Any]) -> None:
    """Store a response and its batch. Blocks; a kill in between leaves nothing that runs."""
    line = {"custom_id": response.id, "method": "POST", "url": _URL, "body": job}
    file = new_file_id()
    responses.write(file, response.owner, encode(line) + b"\n")
    responses.keep(response)
    wanted = HttpBatchRequest(_URL, _WINDOW, _WINDOW_S, file, None, 0, KEPT_S, id=response.id)
    responses.rows.create(wanted, response.owner)
