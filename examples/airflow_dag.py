"""Every night at ten a file of jobs goes to the gateway; a retry finds the batch again. For Airflow 3.

Put it with http_batch.py into the folder of DAGs. Airflow 2 has the same decorators in airflow.decorators.
TOKENMILL_URL says where the gateway is, TOKENMILL_JOBS the folder with a file of jobs for each day.
"""

import os
from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task
from http_batch import answered


@dag(schedule="0 22 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1)
def nightly_batch() -> None:
    """Jobs of the day to answers of the day."""

    @task(retries=5, retry_delay=timedelta(minutes=5), execution_timeout=timedelta(hours=10))
    def answer(ds: str = "") -> dict[str, int]:
        """`ds` is the day, which Airflow fills in."""
        folder = Path(os.environ["TOKENMILL_JOBS"])
        return answered("airflow-nightly", folder / f"jobs-{ds}.jsonl", folder / f"results-{ds}.jsonl")

    answer()


nightly_batch()
