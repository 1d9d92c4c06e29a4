"""A file of jobs answered by a gateway over HTTP, safely from anything that retries: Airflow, Prefect, cron, a shell.

The batch carries a key made of a name and of the file's content. Whoever calls with the same again finds the batch that
is under way, or its results: nothing is handed in twice, whatever was killed in between. Needs httpx alone.

    TOKENMILL_URL=http://127.0.0.1:8181 python http_batch.py nightly jobs.jsonl results.jsonl
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

KEY = "run"  # in the batch's metadata
OVER = {"completed", "failed", "expired", "cancelled"}


def answered(
    name: str,
    jobs: Path,
    results: Path,
    *,
    url: str | None = None,
    api_key: str | None = None,
    window: str = "24h",
    poll_s: float = 15.0,
    patience_s: float = 600.0,
) -> dict[str, int]:
    """Have every line of `jobs` answered and write `results`; how many were, and how many failed.

    Lines without an answer go to a file beside the results, with .errors in its name. `patience_s`: how long a gateway
    may be away, for a restart, before that is an error.
    """
    url = url or os.environ.get("TOKENMILL_URL", "http://127.0.0.1:8181")
    key = api_key or os.environ.get("TOKENMILL_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as client:
        gateway = _Gateway(client, patience_s)
        batch = gateway.batch(f"{name}-{_digest(jobs)}", jobs, window)
        while batch["status"] not in OVER:
            time.sleep(poll_s)
            batch = gateway.get(f"/v1/batches/{batch['id']}").json()
        if batch["status"] != "completed":
            raise RuntimeError(f"batch {batch['id']} is {batch['status']}: {batch.get('errors')}")
        gateway.fetch(batch.get("output_file_id"), results)
        gateway.fetch(batch.get("error_file_id"), results.with_suffix(f".errors{results.suffix}"))
    return {"answered": batch["request_counts"]["completed"], "failed": batch["request_counts"]["failed"]}


class _Gateway:
    def __init__(self, client: httpx.Client, patience_s: float) -> None:
        self._client, self._patience_s = client, patience_s

    def batch(self, key: str, jobs: Path, window: str) -> dict[str, Any]:
        """The batch of this key that is under way or done; one that was given up is handed in anew."""
        found: list[dict[str, Any]] = self.get("/v1/batches", {f"metadata[{KEY}]": key, "limit": "1"}).json()["data"]
        if found and found[0]["status"] in OVER - {"completed"}:
            found = []
        return found[0] if found else self._handed_in(key, jobs, window)

    def _handed_in(self, key: str, jobs: Path, window: str) -> dict[str, Any]:
        with jobs.open("rb") as file:
            sent = self._client.post("/v1/files", files={"file": (jobs.name, file)}, data={"purpose": "batch"})
        made = self._client.post(
            "/v1/batches",
            json={
                "input_file_id": _checked(sent).json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": window,
                "metadata": {KEY: key},
            },
        )
        batch: dict[str, Any] = _checked(made).json()
        return batch

    def fetch(self, file: str | None, target: Path) -> None:
        """Write a file whole or not at all."""
        part = target.with_name(f".{target.name}.part")
        with part.open("wb") as written:
            if file is not None:
                with self._client.stream("GET", f"/v1/files/{file}/content") as answer:
                    answer.raise_for_status()
                    for piece in answer.iter_bytes():
                        written.write(piece)
            written.flush()
            os.fsync(written.fileno())
        part.replace(target)

    def get(self, path: str, query: dict[str, str] | None = None) -> httpx.Response:
        """Ask; while the gateway is away or busy, again."""
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self._client.get(path, params=query)
                if answer.status_code not in (429, 502, 503, 504) or time.monotonic() > until_s:
                    return _checked(answer)
            except httpx.TransportError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(min(5.0, self._patience_s))


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url} answered {answer.status_code}: {answer.text[:500]}")
    return answer


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


if __name__ == "__main__":
    print(answered(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
