"""A Prefect flow that runs a file of jobs on the gateway every night at ten; a retry re-attaches to the batch.

TOKENMILL_URL=http://127.0.0.1:8181 TOKENMILL_JOBS=jobs python prefect_flow.py
"""

import os
from datetime import UTC, datetime
from pathlib import Path

from http_batch import run_batch
from prefect import flow, task


@task(retries=5, retry_delay_seconds=300)
def answer(day: str) -> dict[str, int]:
    """Answer the jobs of a day."""
    folder = Path(os.environ["TOKENMILL_JOBS"])
    return run_batch("prefect-nightly", folder / f"jobs-{day}.jsonl", folder / f"results-{day}.jsonl")


@flow
def nightly_batch(day: str | None = None) -> dict[str, int]:
    """Answer the jobs of a day; default: today."""
    return answer(day or datetime.now(UTC).date().isoformat())


if __name__ == "__main__":
    nightly_batch.serve(name="tokenmill-nightly", cron="0 22 * * *")
