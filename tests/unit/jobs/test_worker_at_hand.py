"""Who has a job: the scheduler, the trial of suspects, or time."""

from tokenmill.engine.engine import Usage
from tokenmill.jobs.models import JobId, Waiting
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker.job_buffer import JobBuffer

USAGE = Usage(10, 2, 0)


def hand(width: int = 2) -> JobBuffer:
    return JobBuffer(Scheduler(EngineShape("shares", width)))


def row(job: int, *, deaths: int = 0) -> Waiting:
    return Waiting(job, 0, job.to_bytes(8, "big") + b"same", 100, None, None, 0, deaths)


def come(at_hand: JobBuffer, *rows: Waiting, more: bool = False) -> None:
    at_hand.come(rows, deadline_s=lambda _: None, more=more)


def sent(at_hand: JobBuffer, *in_flight: int) -> list[int]:
    return [each.job for each in at_hand.decide(in_flight, 0) if isinstance(each, Dispatch | Pending)]


def test_jobs_go_through_the_scheduler_and_leave_with_their_outcome() -> None:
    at_hand = hand()
    assert [type(each) for each in at_hand.decide((), 0)] == [Fetch]
    come(at_hand, row(1), row(2), row(3))
    assert sent(at_hand) == [1, 2]
    at_hand.came(1, 1, trial=False)
    assert at_hand.answered(1, USAGE, trial=False) is not None
    at_hand.drop([1])
    assert sent(at_hand, 2) == [3]
    at_hand.failed(2, retry_at_s=None, trial=False)
    at_hand.answered(3, USAGE, trial=False)
    at_hand.drop([2, 3])
    assert at_hand.empty


def test_a_job_that_failed_waits_its_time_and_comes_back() -> None:
    at_hand = hand()
    come(at_hand, row(1))
    assert sent(at_hand) == [1]
    at_hand.failed(1, retry_at_s=100.0, trial=False)
    assert (at_hand.retrying, at_hand.next_retry_s, at_hand.empty) == (1, 100.0, False)
    at_hand.due(99.0)
    assert sent(at_hand) == []
    come(at_hand, row(1))  # the store gives it out again before its time here
    assert sent(at_hand) == []
    at_hand.due(100.0)
    assert sent(at_hand) == [1]


def test_suspects_go_before_everything_else_and_alone() -> None:
    at_hand = hand(width=3)
    come(at_hand, row(1), row(2), row(3), row(4), more=True)
    assert sent(at_hand) == [1, 2, 3]
    at_hand.died([(1, 0), (2, 0), (3, 5)], accused=True)
    assert sent(at_hand) == [1]
    assert sent(at_hand, 1) == []
    at_hand.came(1, 8, trial=True)  # further than before: cleared
    assert sent(at_hand, 1) == [2]
    assert at_hand.on_trial == 2
    at_hand.answered(2, USAGE, trial=True)
    assert sent(at_hand, 1) == [3]
    at_hand.drop([3])  # set aside
    assert sent(at_hand, 1) == [4]


def test_jobs_of_an_engine_that_another_process_killed_are_scheduled_again_together() -> None:
    at_hand = hand(width=3)
    come(at_hand, row(1), row(2), row(3), row(4), more=True)
    assert sent(at_hand) == [1, 2, 3]
    at_hand.died([(1, 0), (2, 0), (3, 5)], accused=False)
    assert not at_hand.trying
    assert sorted(sent(at_hand)) == [1, 2, 3]


def test_a_job_that_an_engine_died_with_in_an_earlier_run_is_a_suspect_from_the_start() -> None:
    at_hand = hand()
    come(at_hand, row(1), row(2, deaths=1), row(3))
    assert sent(at_hand) == [2]
    at_hand.answered(2, USAGE, trial=True)
    assert sent(at_hand) == [1, 3]


def test_held_jobs_are_nobodys_until_they_are_freed() -> None:
    at_hand = hand()
    come(at_hand, row(1), row(2))
    assert sent(at_hand) == [1, 2]
    at_hand.held([2])
    at_hand.failed(1, retry_at_s=None, trial=False)
    assert sent(at_hand) == []
    at_hand.freed(2)
    assert sent(at_hand) == [2]


def test_all_of_a_batch_can_be_dropped() -> None:
    at_hand = hand()
    mine, other = JobId.of(1, 1), JobId.of(2, 1)
    come(at_hand, row(mine), row(other))
    assert at_hand.of_batch(1) == [mine]
    at_hand.drop(at_hand.of_batch(1))
    assert sent(at_hand) == [other]
