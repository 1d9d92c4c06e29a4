"""JobBuffer: jobs with the scheduler, suspects on trial, jobs waiting for a retry."""

from tokenmill.engine.engine import Usage
from tokenmill.jobs.models import JobId, QueuedJob
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker.job_buffer import JobBuffer

USAGE = Usage(10, 2, 0)


def new_buffer(width: int = 2) -> JobBuffer:
    return JobBuffer(Scheduler(EngineShape("shares", width)))


def row(job: int, *, crashes: int = 0) -> QueuedJob:
    return QueuedJob(job, 0, job.to_bytes(8, "big") + b"same", 100, None, None, 0, crashes)


def add(buffer: JobBuffer, *rows: QueuedJob, more: bool = False) -> None:
    buffer.add(rows, deadline_s=lambda _: None, more=more)


def sent(buffer: JobBuffer, *in_flight: int) -> list[int]:
    return [each.job for each in buffer.decide(in_flight, 0) if isinstance(each, Dispatch | Pending)]


def test_jobs_go_through_the_scheduler_and_leave_with_their_outcome() -> None:
    buffer = new_buffer()
    assert [type(each) for each in buffer.decide((), 0)] == [Fetch]
    add(buffer, row(1), row(2), row(3))
    assert sent(buffer) == [1, 2]
    buffer.received(1, 1, trial=False)
    assert buffer.answered(1, USAGE, trial=False) is not None
    buffer.drop([1])
    assert sent(buffer, 2) == [3]
    buffer.failed(2, retry_at_s=None, trial=False)
    buffer.answered(3, USAGE, trial=False)
    buffer.drop([2, 3])
    assert buffer.empty


def test_a_job_that_failed_waits_its_time_and_comes_back() -> None:
    buffer = new_buffer()
    add(buffer, row(1))
    assert sent(buffer) == [1]
    buffer.failed(1, retry_at_s=100.0, trial=False)
    assert (buffer.retrying, buffer.next_retry_s, buffer.empty) == (1, 100.0, False)
    buffer.advance_clock(99.0)
    assert sent(buffer) == []
    add(buffer, row(1))  # the store gives it out again before its time here
    assert sent(buffer) == []
    buffer.advance_clock(100.0)
    assert sent(buffer) == [1]


def test_suspects_go_before_everything_else_and_alone() -> None:
    buffer = new_buffer(width=3)
    add(buffer, row(1), row(2), row(3), row(4), more=True)
    assert sent(buffer) == [1, 2, 3]
    buffer.engine_died([(1, 0), (2, 0), (3, 5)], suspect=True)
    assert sent(buffer) == [1]
    assert sent(buffer, 1) == []
    buffer.received(1, 8, trial=True)  # further than before: cleared
    assert sent(buffer, 1) == [2]
    assert buffer.on_trial == 2
    buffer.answered(2, USAGE, trial=True)
    assert sent(buffer, 1) == [3]
    buffer.drop([3])  # quarantined
    assert sent(buffer, 1) == [4]


def test_jobs_of_an_engine_that_another_process_killed_are_scheduled_again_together() -> None:
    buffer = new_buffer(width=3)
    add(buffer, row(1), row(2), row(3), row(4), more=True)
    assert sent(buffer) == [1, 2, 3]
    buffer.engine_died([(1, 0), (2, 0), (3, 5)], suspect=False)
    assert not buffer.trying
    assert sorted(sent(buffer)) == [1, 2, 3]


def test_a_job_that_an_engine_died_with_in_an_earlier_run_is_a_suspect_from_the_start() -> None:
    buffer = new_buffer()
    add(buffer, row(1), row(2, crashes=1), row(3))
    assert sent(buffer) == [2]
    buffer.answered(2, USAGE, trial=True)
    assert sent(buffer) == [1, 3]


def test_held_jobs_are_nobodys_until_they_are_freed() -> None:
    buffer = new_buffer()
    add(buffer, row(1), row(2))
    assert sent(buffer) == [1, 2]
    buffer.hold([2])
    buffer.failed(1, retry_at_s=None, trial=False)
    assert sent(buffer) == []
    buffer.restore(2)
    assert sent(buffer) == [2]


def test_all_of_a_batch_can_be_dropped() -> None:
    buffer = new_buffer()
    mine, other = JobId.of(1, 1), JobId.of(2, 1)
    add(buffer, row(mine), row(other))
    assert buffer.of_batch(1) == [mine]
    buffer.drop(buffer.of_batch(1))
    assert sent(buffer) == [other]
