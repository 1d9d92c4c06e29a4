"""A server that dies during a batch: the next one continues, and the batch returns when the server is back."""

import io
import json
import time
from pathlib import Path
from typing import Any, cast

from support.faulty_server import CHAT, LIMIT_S, FaultyServer, engines_at, faulty
from support.gateway import Served, config_in, served
from tokenmill.gateway.backends.health_check import PollPace
from tokenmill.gateway.backends.managed import ManagedBackend

JOBS = 12


def lines(name: str) -> io.BytesIO:
    """A file of jobs that are all different."""
    made = [
        {
            "custom_id": f"{name}-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": CHAT | {"messages": [{"role": "user", "content": f"{name} {number}"}]},
        }
        for number in range(JOBS)
    ]
    file = io.BytesIO("\n".join(map(json.dumps, made)).encode())
    file.name = f"{name}.jsonl"
    return file


def worked(gateway: Served, name: str) -> Any:
    """Hand a batch in and wait until it has ended."""
    client = gateway.client()
    file = client.files.create(file=lines(name), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until_s = time.monotonic() + 2 * LIMIT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < until_s:
        time.sleep(0.1)  # as every client of batches does
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    return batch


def chats(server: FaultyServer, name: str) -> int:
    return sum(name.encode() in body for _, body in server.asked)


def test_remaining_jobs_go_to_the_next_backend(tmp_path: Path) -> None:
    with (
        faulty() as first,
        faulty() as second,
        served(engines_at(first, second), config_in(tmp_path)) as gateway,
    ):
        first.dies_after = 4
        batch = worked(gateway, "torn")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (JOBS, 0)
        text = gateway.client().files.content(batch.output_file_id).text
        assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(
            f"torn-{number}" for number in range(JOBS)
        )
        assert chats(first, "torn") >= 4
        assert chats(second, "torn") >= JOBS - 4
        guard = cast(ManagedBackend, gateway.state.backends[0])
        assert guard.state != "ready"
        first.dies_after = None
        first.end()
        first.begin()
        gateway.call(guard.check(PollPace(timeout_s=LIMIT_S)))
        assert guard.state == "ready"
        worked(gateway, "whole")
        assert chats(first, "whole") == JOBS
