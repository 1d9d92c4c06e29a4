"""Batches by HTTP for tests: lines, files, and waiting for a status."""

import json
import time
from typing import Any

from support.gateway import Served

LIMIT_S = 200.0
FINAL = ("failed", "completed", "expired", "cancelled")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def prompt_line(name: str, prompt: str, **body: Any) -> str:
    """A line for a completion."""
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": COMPLETION, "body": {"model": "fake", "prompt": prompt, **body}}
    )


def chat_line(name: str, text: str, **body: Any) -> str:
    """A line for a chat with the small model."""
    given = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": given | body})


def uploaded(client: Any, *lines: str, name: str = "jobs.jsonl") -> Any:
    """Upload a file of lines."""
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")


def created(client: Any, *lines: str, endpoint: str = COMPLETION, window: str = "24h", **more: Any) -> Any:
    """Create a batch of lines."""
    file = uploaded(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def until(client: Any, batch: Any, *statuses: str, done: int = 0) -> Any:
    """Wait until a batch has one of these statuses and a number of answers; returns it."""
    end = time.monotonic() + LIMIT_S
    while batch.status not in statuses or batch.request_counts.completed < done:
        assert time.monotonic() < end, batch
        assert batch.status in statuses or batch.status not in FINAL, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client: Any, file: str) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def events(gateway: Served, batch: str) -> list[str]:
    """The statuses that the log tells of a batch."""
    return [line["status"] for line in gateway.lines if line.get("batch") == batch and "status" in line]
