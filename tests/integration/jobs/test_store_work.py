"""Jobs through their states: started, answered once, retried, set aside, cancelled; counted rightly throughout."""

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from support.job_machine import Jobs
from support.jobs_store import Clock, answer, pending, submitted, write_jobs
from support.postgres import Cluster, past
from support.prefix_keys import old_place
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, Failure, JobId, JobOutcome, QueuedJob, State, Submission
from tokenmill.jobs.scheduler.estimates import AnswerLengths
from tokenmill.jobs.scheduler.prefix_groups import shared_bytes
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store, ask_to_cancel

BROKE = Failure("engine_died", "the engine died")


def states(store: Store, batch: int) -> list[str]:
    return [result.state.word for result in store.results(batch, 0, 1000)]


def test_a_job_from_line_to_answer(tmp_path: Path, address: Address) -> None:
    clock = Clock()
    with Store(address, clock=clock) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"], max_tokens=5)
        assert batch.counts == Counts(pending=2)
        assert (batch.lines, batch.sealed_s, batch.finished) == (2, clock.now_s, False)
        first, second = pending(store, batch)
        started = store.start([first])
        (job,) = started.running
        assert job.id == first
        assert json.loads(job.line)["max_tokens"] == 5
        assert store.batch(batch.id).counts == Counts(pending=1, running=1)
        assert store.commit([answer(first)]) == (JobOutcome(first, State.DONE),)
        store.start([second])
        store.commit([answer(second, "no")])
        batch = store.batch(batch.id)
        assert batch.counts == Counts(done=2)
        assert batch.finished
        assert (batch.totals.computed, batch.totals.prompt_tokens, batch.totals.cached_tokens) == (2, 20, 8)
        assert batch.totals.engine_s == 1.0


def test_committing_again_changes_nothing(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        (job,) = pending(store, batch)
        store.start([job])
        store.commit([answer(job, "first")])
        before = store.batch(batch.id)
        assert store.commit([answer(job, "second")]) == ()
        assert store.results(batch.id, 0, 1)[0].body == b'{"text": "first"}'
        assert store.batch(batch.id) == before


def test_answers_are_found_again_across_files_and_openings(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        store.start(pending(store, batch))
        store.commit([answer(job) for job in (JobId.of(batch.id, 1), JobId.of(batch.id, 2))])
    with Store(address) as store:
        other = submitted(store, tmp_path / "k", ["b", "new", "a"])
        assert states(store, other.id) == ["done", "pending", "done"]
        assert other.counts == Counts(pending=1, done=2)
        assert (other.totals.reused, other.totals.computed) == (2, 0)
        forced = submitted(store, tmp_path / "l", ["b", "a"], {"reuse": False})
        assert forced.counts == Counts(pending=2)
        other_model = submitted(store, tmp_path / "m", ["b"], {"model_id": "n"})
        assert other_model.counts == Counts(pending=1)


def test_equal_jobs_are_computed_once(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "a", "a", "b"])
        jobs = [JobId.of(batch.id, number) for number in range(1, 5)]
        started = store.start(jobs[:2])
        assert [job.id for job in started.running] == jobs[:1]
        assert started.held == (jobs[1],)
        assert set(store.commit([answer(jobs[0])])) == {
            JobOutcome(jobs[0], State.DONE),
            JobOutcome(jobs[1], State.DONE, reused=True),
        }
        # The third was not asked for yet: the answer is there when it is.
        started = store.start(jobs[2:])
        assert started.answered == (JobOutcome(jobs[2], State.DONE, reused=True),)
        assert [job.id for job in started.running] == jobs[3:]
        assert store.batch(batch.id).totals.reused == 2
        assert len({result.body for result in store.results(batch.id, 0, 3)}) == 1


def test_equals_are_free_again_when_the_first_fails(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "a"])
        one, other = JobId.of(batch.id, 1), JobId.of(batch.id, 2)
        store.start([one, other])
        assert store.fail(one, Failure("timeout", "too slow")) == (
            JobOutcome(one, State.FAILED),
            JobOutcome(other, State.PENDING),
        )
        assert [job.id for job in store.start([other]).running] == [other]


def test_order_is_priority_then_place(tmp_path: Path, address: Address) -> None:
    heads = ["x" * 2000, "y" * 2000, "z" * 2000]
    prompts = [heads[number % 3] + str(number) for number in range(60)]
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", prompts)
        urgent = submitted(store, tmp_path / "k", [prompt + "!" for prompt in prompts[:6]], {"priority": 5})
        found = store.waiting([batch.id, urgent.id], limit=100)
        assert [JobId.batch(item.id) for item in found[:6]] == [urgent.id] * 6
        kinds = [JobId.line(item.id) % 3 for item in found[6:]]
        assert sum(one != other for one, other in pairwise(kinds)) == 2
        pages, after = [], None
        while page := store.waiting([batch.id, urgent.id], after=after, limit=7):
            pages += page
            after = page[-1].key
        assert pages == found


def test_retries_wait_their_time(tmp_path: Path, address: Address) -> None:
    clock = Clock()
    with Store(address, clock=clock) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        (job,) = pending(store, batch)
        store.start([job])
        assert store.fail(job, BROKE, retry_at_s=clock.now_s + 10) == (JobOutcome(job, State.PENDING),)
        assert pending(store, batch) == []
        assert store.next_retry_s() == clock.now_s + 10
        assert store.batch(batch.id).counts == Counts(pending=1)
        clock.now_s += 10
        assert pending(store, batch) == [job]
        (again,) = store.start([job]).running
        assert again.attempts == 1
        assert store.next_retry_s() is None


def test_a_job_that_kills_engines_is_set_aside(tmp_path: Path, address: Address) -> None:
    clock = Clock()
    with Store(address, clock=clock) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        poison, innocent = JobId.of(batch.id, 1), JobId.of(batch.id, 2)
        store.start([poison, innocent])
        assert {item.state for item in store.record_crash([poison, innocent], BROKE, retry_at_s=clock.now_s)} == {
            State.PENDING
        }
        assert {item.crashes for item in store.waiting([batch.id], limit=9)} == {1}
        store.start([poison])
        assert store.record_crash([poison], BROKE, retry_at_s=clock.now_s) == (JobOutcome(poison, State.QUARANTINED),)
        assert states(store, batch.id) == ["quarantined", "pending"]
        assert store.failures(batch.id, 0, 9)[0].message == BROKE.message
        assert store.retry(batch.id) == 1
        job = store.job(poison)
        assert job is not None
        assert (job.state, job.crashes, job.attempts) == (State.PENDING, 0, 0)


def test_what_ran_is_pending_after_a_reopening_and_had_no_attempt(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        store.start(pending(store, batch))
    with Store(address) as store:
        assert store.batch(batch.id).counts == Counts(pending=2)
        assert {item.attempts for item in store.waiting([batch.id], limit=9)} == {0}


def test_released_jobs_had_no_attempt(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        store.start(pending(store, batch))
        store.release([JobId.of(batch.id, 1)])
        (waiting,) = store.waiting([batch.id], limit=9)
        assert waiting.attempts == 0


def test_cancel_and_what_comes_late(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
        first = JobId.of(batch.id, 1)
        store.start([first])
        assert store.cancel(batch.id) == 3
        assert store.commit([answer(first)]) == ()
        cancelled = store.batch(batch.id)
        assert cancelled.counts == Counts(cancelled=3)
        assert cancelled.finished
        assert cancelled.cancelled_s is not None
        assert (cancelled.totals.computed, cancelled.totals.completion_tokens) == (0, 2)  # paid for, and not done
        # The answer that came late is kept for others.
        assert submitted(store, tmp_path / "k", ["a"]).counts == Counts(done=1)
        assert store.retry(batch.id) == 0
        assert store.retry(batch.id, cancelled=True) == 3
        assert [item.state for item in store.start([first]).answered] == [State.DONE]
        again = store.batch(batch.id)
        assert (again.counts.done, again.totals.computed, again.totals.reused) == (1, 0, 1)


def test_another_process_may_ask_to_cancel(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        assert store.cancel_requests() == []
        ask_to_cancel(address, batch.name)
        assert store.cancel_requests() == [batch.id]
        store.cancel(batch.id)
        assert store.cancel_requests() == []
        with pytest.raises(UsageError, match="'batch_x'", check=lambda error: error.code == "batch_not_found"):
            ask_to_cancel(address, "batch_x")


def test_deadlines(tmp_path: Path, address: Address) -> None:
    clock = Clock()
    with Store(address, clock=clock) as store:
        batch = submitted(store, tmp_path / "j", ["a"], {"deadline_s": clock.now_s + 50})
        own = submitted(store, tmp_path / "k", ["b"], deadline=clock.now_s + 10)
        assert [JobId.batch(item.id) for item in store.due(clock.now_s + 20, 9)] == [own.id]
        assert store.due(clock.now_s + 5, 9) == []
        assert store.expire() == 0
        clock.now_s += 10
        assert store.expire() == 1
        clock.now_s += 40
        assert store.expire() == 1
        assert [store.batch(item).counts for item in (batch.id, own.id)] == [Counts(failed=1)] * 2
        assert store.failures(own.id, 0, 1)[0].code == "deadline"


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_pending_jobs_come_by_priority_then_by_batch(tmp_path: Path, address: Address, limit: int) -> None:
    """Page by page, and none twice or never, in whatever order the batches are named."""
    with Store(address) as store:
        batches = [
            submitted(
                store, tmp_path / f"{name}{priority}", [f"{name}{number}" for number in range(4)], priority=priority
            )
            for name in "abc"
            for priority in (0, 5, -1)
        ]
        found, after = list[QueuedJob](), None
        while page := store.waiting([batch.id for batch in reversed(batches)], after=after, limit=limit):
            found += page
            after = page[-1].key
        assert [item.key for item in found] == sorted(item.key for item in found)
        assert len({item.id for item in found}) == len(found) == 36
        order = [JobId.batch(item.id) for item in found][::4]
        assert order == [batches[index].id for index in (1, 4, 7, 0, 3, 6, 2, 5, 8)]


@pytest.mark.parametrize("old", [60, 30])
def test_a_batch_of_an_older_version_is_worked_head_by_head(tmp_path: Path, address: Address, old: int) -> None:
    """All of it has places of the older form, or a half: whoever stored that was killed, and the rest came later."""
    heads = [f"{name} " * 300 for name in ("one", "two", "three")]
    prompts = [f"{heads[number % 3]}{number}" for number in range(60)]
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", prompts)
        with past(address) as ask:
            for number, prompt in enumerate(prompts[:old], 1):
                change = "UPDATE jobs SET place = ? WHERE id = ?"
                ask(change, old_place(prompt.encode()), JobId.of(batch.id, number))
        found, after = list[QueuedJob](), None
        while page := store.waiting([batch.id], after=after, limit=7):
            found += page
            after = page[-1].key
        records = [AnswerLengths().pending(item) for item in found]
        assert sorted(item.id & 0xFFFF for item in found) == list(range(1, 61))
        shared = [shared_bytes(*pair) for pair in pairwise(records)]
        groups = 3 if old == 60 else 6
        assert shared.count(0) == groups - 1
        assert sorted(set(shared)) == [0, 1024, 1536]  # as much as there is of each head in chunks of 512 bytes


def test_readers_see_and_never_wait(tmp_path: Path, address: Address) -> None:
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        with StoreReader(address) as reader, store._database.writing(durable=True):
            store._database.run("start", job=JobId.of(batch.id, 1), runner=None)
            assert reader.batch(batch.id).counts == Counts(pending=2)  # a transaction is under way
        with StoreReader(address) as reader:
            assert [item.counts for item in reader.batches()] == [Counts(pending=1, running=1)]
            assert reader.named(batch.name).id == batch.id
    with StoreReader(address) as reader:  # nobody is at work
        assert reader.batch(batch.id).counts.total == 2


def test_threads_take_turns(tmp_path: Path, address: Address) -> None:
    """A file is submitted by one thread while another commits answers."""
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", [f"a{number}" for number in range(200)])
        path = write_jobs(tmp_path / "k", [f"b{number}" for number in range(20_000)])
        other = threading.Thread(target=submit, args=(store, path, Submission("m")))
        other.start()
        for job in pending(store, batch):
            store.start([job])
            store.commit([answer(job)])
        other.join(200)
        assert not other.is_alive()
        assert [item.counts for item in store.batches()] == [Counts(done=200), Counts(pending=20_000)]


Jobs.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestJobs = Jobs.TestCase


def test_anything_in_any_order_on_a_server(postgres: Cluster) -> None:
    class OnServer(Jobs):
        def new_address(self) -> Address:
            return postgres.fresh()

    run_state_machine_as_test(OnServer, settings=settings(max_examples=10, stateful_step_count=15, deadline=None))
