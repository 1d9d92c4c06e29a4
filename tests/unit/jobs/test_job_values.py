"""What a job's number and state mean."""

import pytest

from tokenmill.jobs.models import Counts, Job, JobId, State


@pytest.mark.parametrize("number", [1, 2, JobId.MAX_LINE])
@pytest.mark.parametrize("batch", [1, 77, (1 << 31) - 1])
def test_number_holds_batch_and_line(batch: int, number: int) -> None:
    job = Job(JobId.of(batch, number), "a", State.PENDING, b"", b"", 0, 0, None, None, 0, 0, "")
    assert (job.batch, job.number) == (batch, number)
    assert job.id < 1 << 63


def test_numbers_are_in_the_order_of_files() -> None:
    assert JobId.of(1, JobId.MAX_LINE) < JobId.of(2, 1) < JobId.of(2, 2)


def test_states() -> None:
    # These numbers are in every store on every disk.
    assert {state.name: state.value for state in State} == {
        "PENDING": 0,
        "RUNNING": 1,
        "DONE": 2,
        "FAILED": 3,
        "CANCELLED": 4,
        "QUARANTINED": 5,
    }
    assert [state.word for state in State if not state.final] == ["pending", "running"]
    assert State.QUARANTINED.word == "quarantined"


def test_counts_add_up() -> None:
    counts = Counts(pending=1, running=2, done=3, failed=4, cancelled=5, quarantined=6)
    assert (counts.total, counts.final) == (21, 18)
