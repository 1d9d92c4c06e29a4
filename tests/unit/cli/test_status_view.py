"""States, counts and names of batches in `tokenmill status`."""

from dataclasses import replace
from typing import Any

import pytest

from tokenmill.cli.batches.seen_batch import SeenBatch
from tokenmill.cli.batches.workers import Workers
from tokenmill.jobs.models import Batch, BatchTotals, Counts
from tokenmill.jobs.store.reader import HttpSubmission

BATCH = Batch(
    id=1,
    name="batch_1",
    source="/state/files/file-1",
    model_id="m",
    output="out.jsonl",
    errors=None,
    reuse=True,
    priority=0,
    deadline_s=None,
    defaults={},
    created_s=1.0,
    sealed_s=2.0,
    cancelled_s=None,
    lines=120,
    counts=Counts(pending=96, running=16, done=8),
    totals=BatchTotals(),
)
NOBODY, SOMEBODY = Workers(), Workers(4711)
SENT = HttpSubmission(failed=False, created_s=1.0, filename="night.jsonl")


def seen(workers: Workers, submission: HttpSubmission | None = None, **changes: Any) -> SeenBatch:
    return SeenBatch(replace(BATCH, **changes), workers, workers, submission)


def test_after_a_kill_no_job_runs() -> None:
    found = seen(NOBODY)
    assert found.state == "stopped"
    assert (found.counts.pending, found.counts.running, found.counts.total) == (112, 0, 120)
    assert seen(SOMEBODY).counts == BATCH.counts


@pytest.mark.parametrize(
    ("workers", "submission", "counts", "state"),
    [
        (SOMEBODY, None, BATCH.counts, "running"),
        (SOMEBODY, None, Counts(pending=5), "stopped"),
        (NOBODY, None, Counts(pending=5), "stopped"),
        (SOMEBODY, SENT, Counts(pending=5), "waiting"),
        (NOBODY, SENT, Counts(pending=5), "stopped"),
        (Workers(runners=()), None, Counts(pending=5), "stopped"),
        (SOMEBODY, None, Counts(done=5), "done"),
    ],
)
def test_a_batch_of_a_command_waits_for_nobody_else(
    workers: Workers, submission: HttpSubmission | None, counts: Counts, state: str
) -> None:
    """It stays stopped while another command uses the store; a gateway works on all batches that it was sent."""
    assert seen(workers, submission, counts=counts).state == state


def test_a_batch_over_http_has_the_name_that_its_client_gave() -> None:
    assert seen(SOMEBODY, SENT).source == "night.jsonl"
    assert seen(SOMEBODY, replace(SENT, filename=None)).source == BATCH.source
