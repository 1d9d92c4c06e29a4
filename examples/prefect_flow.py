"""A file of jobs to the gateway as a Prefect flow; a retry finds the batch again.

TOKENMILL_URL=http://127.0.0.1:8181 python prefect_flow.py        every night at ten, while this runs
"""

import os
from datetime import UTC, datetime
from pathlib import Path

from http_batch import answered
from prefect import flow, task


@task(retries=5, retry_delay_seconds=300)
def answer(day: str) -> dict[str, int]:
    """Jobs of a day to answers of the day."""
    folder = Path(os.environ["TOKENMILL_JOBS"])
    return answered("prefect-nightly", folder / f"jobs-{day}.jsonl", folder / f"results-{day}.jsonl")


@flow
def nightly_batch(day: str | None = None) -> dict[str, int]:
    """One night."""
    return answer(day or datetime.now(UTC).date().isoformat())


if __name__ == "__main__":
    nightly_batch.serve(name="tokenmill-nightly", cron="0 22 * * *")
