"""A store for tests: jobs from a few words, answers from their names."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, FinishedJob, Submission
from tokenmill.jobs.store.store import Store


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def write_jobs(path: Path, prompts: Iterable[str], **keys: Any) -> Path:
    """A file of plain lines; custom_id is the prompt with its line."""
    lines = [
        json.dumps({"custom_id": f"{number}-{prompt}"[:500], "prompt": prompt, **keys})
        for number, prompt in enumerate(prompts, 1)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def submitted(
    store: Store, path: Path, prompts: Iterable[str], how: Mapping[str, Any] | None = None, **keys: Any
) -> Batch:
    """A batch of those prompts; its output is next to the file."""
    write_jobs(path, prompts, **keys)
    settings = {"model_id": "m", "output": str(path.with_suffix(".out")), **(how or {})}
    return submit(store, path, Submission(**settings)).batch


def answer(job: int, text: str = "yes") -> FinishedJob:
    """An answer that has come."""
    body = json.dumps({"text": text}).encode()
    return FinishedJob(job, body, prompt_tokens=10, completion_tokens=2, cached_tokens=4, engine_s=0.5)


def pending(store: Store, batch: Batch) -> list[int]:
    """Every job that could be started, in order."""
    return [item.id for item in store.waiting([batch.id], limit=1_000_000)]
