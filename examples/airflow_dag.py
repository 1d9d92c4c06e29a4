"""An Airflow 3 DAG that runs a file of jobs on the gateway every night at ten; a retry re-attaches to the batch.

Copy this file and http_batch.py to the folder of DAGs. Airflow 2 has the same decorators in airflow.decorators.
TOKENMILL_URL is the gateway's URL, TOKENMILL_JOBS the folder with a job file for each day.
"""

import os
from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task
from http_batch import run_batch


@dag(schedule="0 22 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1)
def nightly_batch() -> None:
    """Answer the jobs of the day."""

    @task(retries=5, retry_delay=timedelta(minutes=5), execution_timeout=timedelta(hours=10))
    def answer(ds: str = "") -> dict[str, int]:
        """Run the batch; Airflow sets `ds` to the day."""
        folder = Path(os.environ["TOKENMILL_JOBS"])
        return run_batch("airflow-nightly", folder / f"jobs-{ds}.jsonl", folder / f"results-{ds}.jsonl")

    answer()


nightly_batch()
