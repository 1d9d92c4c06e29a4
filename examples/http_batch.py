"""Runs a file of jobs as a batch on a gateway over HTTP; safe to retry from Airflow, Prefect, cron or a shell.

The batch has a key, made of a name and a hash of the file. A call with the same name and file re-attaches to the
running batch or downloads its results, so nothing is submitted twice, even after a kill. Needs only httpx.

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
FINAL = {"completed", "failed", "expired", "cancelled"}


def run_batch(
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
    """Run the lines of `jobs`, write `results`, and return the numbers of answered and failed lines.

    Failed lines go to a file next to the results, with .errors in its name. `patience_s`: how long to wait for a
    gateway that does not respond, for example during a restart.
    """
    url = url or os.environ.get("TOKENMILL_URL", "http://127.0.0.1:8181")
    key = api_key or os.environ.get("TOKENMILL_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as client:
        gateway = _Gateway(client, patience_s)
        batch = gateway.batch(f"{name}-{_digest(jobs)}", jobs, window)
        while batch["status"] not in FINAL:
            time.sleep(poll_s)
            batch = gateway.get(f"/v1/batches/{batch['id']}").json()
        if batch["status"] != "completed":
            raise RuntimeError(f"batch {batch['id']} is {batch['status']}: {batch.get('errors')}")
        gateway.fetch(batch.get("output_file_id"), results)
        gateway.fetch(batch.get("error_file_id"), results.with_suffix(f".errors{results.suffix}"))
    return {"answered": batch["request_counts"]["completed"], "failed": batch["request_counts"]["failed"]}


class _Gateway:
    def __init__(self, client: httpx.Client, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s

    def batch(self, key: str, jobs: Path, window: str) -> dict[str, Any]:
        """The running or completed batch with this key; submits the jobs if no such batch exists."""
        found: list[dict[str, Any]] = self.get("/v1/batches", {f"metadata[{KEY}]": key, "limit": "1"}).json()["data"]
        if found and found[0]["status"] in FINAL - {"completed"}:
            found = []
        return found[0] if found else self._submit(key, jobs, window)

    def _submit(self, key: str, jobs: Path, window: str) -> dict[str, Any]:
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
        """Download a file and write it atomically; None writes an empty file."""
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
        """Send a GET request; retries while the gateway is unavailable or busy."""
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
    print(run_batch(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
