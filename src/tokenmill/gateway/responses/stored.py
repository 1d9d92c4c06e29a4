"""Stored responses: files of the batch store with the purpose `response`, under the response's id.

A file holds the request, its input items and the response object; conversations are chains of them by
`previous_response_id`. A background response also has a batch with the same id, whose state is the response's.
Methods block.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import RequestRefused
from tokenmill.gateway.batches.files import FileStore, may_see
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.jobs.openai.responses.items import Item
from tokenmill.jobs.store.http_batches import RESPONSE, RESPONSE_ID, HttpBatch, HttpBatches, StoredFile
from tokenmill.jobs.store.sqlite_errors import unusable
from tokenmill.storage.json_text import encode, parse

KEPT_S = 30 * 86400  # as OpenAI
_LONGEST_CHAIN = 1000


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response; `body` is the response object, for a background response as it was created."""

    input: Sequence[Item]
    body: Mapping[str, Any]
    owner: str | None

    @property
    def id(self) -> str:
        """The id, with its prefix."""
        name: str = self.body["id"]
        return name

    @property
    def previous(self) -> str | None:
        """The id of the previous response."""
        name: str | None = self.body.get("previous_response_id")
        return name


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of a store."""

    rows: HttpBatches
    files: FileStore

    def keep(self, response: StoredResponse) -> None:
        """Store a response; it is on disk afterwards."""
        self.write(response.id, response.owner, encode({"input": response.input, "body": response.body}))

    def write(self, file: str, owner: str | None, content: bytes) -> None:
        """Store a file that belongs to a response."""
        draft = self.files.draft(file)
        try:
            with draft.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise unusable(draft.parent, error) from error
        now_s = self.rows.now_s()
        digest = hashlib.sha256(content).hexdigest()
        self.files.keep(StoredFile(file, owner, file, RESPONSE, len(content), digest, now_s, now_s + KEPT_S))

    def get(self, name: str, owner: str | None, *, param: str = "response_id") -> StoredResponse:
        """A response in its current state; raises GatewayFault with status 404 if `owner` may not see it."""
        row = self.rows.file(name) if name.startswith(RESPONSE_ID) else None
        if row is None or row.purpose != RESPONSE or not may_see(owner, row.owner):
            code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
            raise GatewayFault(f"unknown response {name[:60]!r}", status=404, code=code, param=param)
        stored = parse(self.files.path(name).read_text(encoding="utf-8"))
        body = stored["body"]
        batch = self.rows.batch(name)
        if batch is not None:
            body = {**body, **self._state(batch)}
        return StoredResponse(stored["input"], body, row.owner)

    def history(self, name: str | None, owner: str | None) -> list[Item]:
        """The items of a response and of all responses before it, oldest first."""
        turns: list[StoredResponse] = []
        while name is not None and len(turns) < _LONGEST_CHAIN:
            response = self.get(name, owner, param="previous_response_id")
            if response.body["status"] not in ("completed", "incomplete"):
                raise RequestRefused(
                    f"previous_response_id: {name} is {response.body['status']}", param="previous_response_id"
                )
            turns.append(response)
            name = response.previous
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.body["output"])]

    def delete(self, response: StoredResponse) -> None:
        """Delete a response and, if it runs in the background, cancel it."""
        batch = self.rows.batch(response.id)
        if batch is not None:
            self.rows.cancel(batch.id)
            for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                self.files.delete(file)  # the input of an unfinished batch stays until it expires
        self.files.delete(response.id)

    def _state(self, batch: HttpBatch) -> dict[str, Any]:
        """What the batch of a background response adds to the response object."""
        if batch.status in ("cancelling", "cancelled"):
            return {"status": "cancelled"}
        if not batch.final:
            return {"status": "queued" if batch.status == "validating" else "in_progress"}
        outcome = batch.outcome
        if outcome is not None and outcome.completed:
            body = self._line(batch.output_file_id)["response"]["body"]
            kept = ("id", "created_at", "background", "previous_response_id", "store")
            return {key: value for key, value in body.items() if key not in kept}
        if outcome is not None and outcome.failed:
            error = self._line(batch.error_file_id)["error"]
            return {"status": "failed", "error": {"code": error["code"], "message": error["message"]}}
        error = batch.errors[0] if batch.errors else None
        fault = {"code": error.code if error else batch.status, "message": error.message if error else batch.status}
        return {"status": "failed", "error": fault}

    def _line(self, file: str) -> dict[str, Any]:
        return parse(self.files.path(file).read_text(encoding="utf-8"))
