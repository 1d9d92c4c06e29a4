"""Several runners on one server, each in its turn: who gets what, what is lost with a runner, and what comes late."""

import os
from pathlib import Path

import pytest

from support.jobs_store import answer, pending, submitted, write_jobs
from support.postgres import asked
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, Failure, JobOutcome, State, Submission
from tokenmill.jobs.store.address import Address, PostgresAddress
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

BROKE = Failure("timeout", "too slow")

pytestmark = pytest.mark.usefixtures("unkept")


def runner_of(store: Store) -> int:
    assert store._coordinator.id is not None
    return store._coordinator.id


def away(server: PostgresAddress, store: Store) -> None:
    """As if that runner were on another host, which has not been heard of for too long."""
    asked(
        server,
        "UPDATE runners SET kernel = 'elsewhere', lease_until = clock_timestamp() - interval '1 second' WHERE id = ?",
        runner_of(store),
    )


def gathered(server: PostgresAddress) -> None:
    """Somebody looks around."""
    Store(server).close()


def states(store: StoreReader, batch: int) -> list[str]:
    return [result.state.word for result in store.results(batch, 0, 1000)]


def test_a_job_is_one_runners(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one, Store(server) as other:
        batch = submitted(one, tmp_path / "j", [f"p{number}" for number in range(6)])
        jobs = pending(one, batch)
        mine = [job.id for job in one.start(jobs[:4]).running]
        theirs = [job.id for job in other.start(jobs).running]
        assert (mine, theirs) == (jobs[:4], jobs[4:])
        one.commit([answer(job) for job in mine])
        other.commit([answer(job) for job in theirs])
        assert one.batch(batch.id).counts == other.batch(batch.id).counts == Counts(done=6)
        assert one.batch(batch.id).totals.computed == 6


def test_a_job_that_another_is_taking_is_left_to_it(server: PostgresAddress, tmp_path: Path) -> None:
    """Nobody waits for a transaction that is under way."""
    with Store(server) as one, Store(server) as other:
        batch = submitted(one, tmp_path / "j", ["a", "b"])
        first, second = pending(one, batch)
        with one._database.writing(durable=False):
            one._database.run("take", job=first).fetchone()
            assert [job.id for job in other.start([first, second]).running] == [second]


def test_equal_jobs_are_computed_once_by_all_together(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one, Store(server) as other:
        batch = submitted(one, tmp_path / "j", ["same", "same", "same"])
        first, second, third = pending(one, batch)
        assert len(one.start([first]).running) == 1
        assert one.start([second]).held == (second,)
        assert other.start([third]).held == (third,)
        assert {item.job for item in one.commit([answer(first)])} == {first, second}
        assert other.start([third]).answered == (JobOutcome(third, State.DONE, reused=True),)
        found = one.batch(batch.id)
        assert (found.totals.computed, found.totals.reused) == (1, 2)


def test_equal_jobs_started_in_the_same_moment_run_once(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one, Store(server) as other:
        batch = submitted(one, tmp_path / "j", ["same", "same"])
        first, second = pending(one, batch)
        identity = one.job(first)
        assert identity is not None
        assert identity.identity is not None
        with one._database.writing(durable=False):
            assert not one._coordinator.busy(identity.identity)  # and from here on it is claimed
            assert other.start([second]).held == (second,)
        assert [job.id for job in other.start([second]).running] == [second]


def test_what_a_lost_runner_had_is_pending_again_and_done_once(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as lost, Store(server) as other:
        batch = submitted(lost, tmp_path / "j", ["a", "b", "c"])
        jobs = pending(lost, batch)
        lost.start(jobs[:2])
        other.start(jobs[2:])
        away(server, lost)
        gathered(server)
        assert [item.id for item in other.waiting([batch.id], limit=9)] == jobs[:2]
        assert other.batch(batch.id).counts == Counts(pending=2, running=1)  # the other's runs on
        again = other.start(jobs[:2]).running
        assert [job.crashes for job in again] == [0, 0]  # the first time nobody is a suspect
        other.commit([answer(job.id, "anew") for job in again])
        # The lost one was only asleep.
        assert lost.commit([answer(job, "late") for job in jobs[:2]]) == ()
        found = other.batch(batch.id)
        assert (found.counts, found.totals.computed) == (Counts(running=1, done=2), 2)
        assert {item.body for item in other.results(batch.id, 0, 9)} == {b'{"text": "anew"}', None}


def test_a_runner_that_wakes_first_has_the_answer_and_the_other_changes_nothing(
    server: PostgresAddress, tmp_path: Path
) -> None:
    with Store(server) as slept, Store(server) as other:
        batch = submitted(slept, tmp_path / "j", ["a"])
        (job,) = pending(slept, batch)
        slept.start([job])
        away(server, slept)
        gathered(server)
        assert len(other.start([job]).running) == 1
        assert slept.commit([answer(job, "first")]) == (JobOutcome(job, State.DONE),)
        assert other.commit([answer(job, "second")]) == ()
        (result,) = other.results(batch.id, 0, 9)
        assert result.body == b'{"text": "first"}'
        assert other.batch(batch.id).totals.computed == 1


def test_a_runner_that_wakes_takes_nothing_from_whoever_has_its_jobs_now(
    server: PostgresAddress, tmp_path: Path
) -> None:
    with Store(server) as slept, Store(server) as other:
        batch = submitted(slept, tmp_path / "j", ["a", "b", "c", "d"])
        jobs = pending(slept, batch)
        slept.start(jobs)
        away(server, slept)
        gathered(server)
        other.start(jobs)
        assert slept.fail(jobs[0], BROKE) == ()
        assert slept.fail(jobs[1], BROKE, retry_at_s=0.0) == ()
        assert slept.record_crash([jobs[2]], BROKE, retry_at_s=0.0) == ()
        slept.release(jobs[3:])
        slept.renew_lease()
        slept.close()
        assert other.batch(batch.id).counts == Counts(running=4)
        assert len(other.commit([answer(job) for job in jobs])) == 4


def test_a_job_that_every_runner_dies_with_is_set_aside(server: PostgresAddress, tmp_path: Path) -> None:
    """Done once more as if nothing had been, then as a suspect, which is tried alone, and no more."""
    with Store(server) as watching:
        batch = submitted(watching, tmp_path / "j", ["poison"])
        found = []
        for _ in range(3):
            runner = Store(server)
            (job,) = pending(watching, batch)
            runner.start([job])
            away(server, runner)
            gathered(server)
            now = watching.job(job)
            assert now is not None
            found.append((now.state, now.crashes))
            assert now.attempts == 0  # none of them was the job's
            runner.close()
        assert found == [(State.PENDING, 0), (State.PENDING, 1), (State.QUARANTINED, 2)]
        (failure,) = watching.failures(batch.id, 0, 9)
        assert failure.code == "runner_lost"
        assert watching.retry(batch.id) == 1
        with Store(server) as runner:
            runner.start([job])
            away(server, runner)
            gathered(server)
            again = watching.job(job)
        assert again is not None
        assert (again.state, again.crashes) == (State.PENDING, 0)  # all its chances are new


def test_opening_leaves_those_alone_that_live(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one:
        batch = submitted(one, tmp_path / "j", ["a"])
        one.start(pending(one, batch))
        with Store(server) as other:
            assert other.batch(batch.id).counts == Counts(running=1)
        assert one.batch(batch.id).counts == Counts(running=1)
    with Store(server) as later:  # who leaves hands back what it had
        assert later.batch(batch.id).counts == Counts(pending=1)
        assert [item.attempts for item in later.waiting([batch.id], limit=9)] == [0]


def test_a_lease_is_renewed_as_work_goes_on(server: PostgresAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(server) as store:
        asked(server, "UPDATE runners SET lease_until = clock_timestamp() - interval '1 second'")
        store.renew_lease()  # it was renewed a moment ago, as far as it knows
        with StoreReader(server) as reader:
            assert [runner.alive for runner in reader.runners()] == [False]
        monkeypatch.setattr("tokenmill.jobs.sharding.worker_lease.RENEW_S", 0.0)
        store.renew_lease()
        with StoreReader(server) as reader:
            (runner,) = reader.runners()
        assert (runner.alive, runner.pid, runner.running) == (True, os.getpid(), 0)
        asked(server, "DELETE FROM runners")  # others took it for lost
        store.renew_lease()
        with StoreReader(server) as reader:
            assert [each.id for each in reader.runners()] == [runner.id]


def test_sums_stay_the_same_when_they_are_folded(
    server: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.jobs.sharding.worker_lease.RENEW_S", 0.0)
    monkeypatch.setattr("tokenmill.jobs.sharding.worker_lease.FOLD_S", 0.0)
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
        for job in pending(store, batch):
            store.start([job])
            store.commit([answer(job)])
        before = store.batch(batch.id)
        store.renew_lease()
        assert store.batch(batch.id) == before
        assert asked(server, "SELECT state, jobs FROM counts WHERE jobs <> 0") == [(2, 3)]
        assert asked(server, "SELECT computed FROM totals") == [(3,)]


def test_one_runner_writes_the_output(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one:
        batch = submitted(one, tmp_path / "j", ["a"])
        with Store(server) as other:
            assert one.claim_output(batch.id)
            assert one.claim_output(batch.id)
            assert not other.claim_output(batch.id)
            one.close()
            assert other.claim_output(batch.id)


def test_one_process_stores_the_lines_of_a_batch(
    server: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another that is given the same file meanwhile waits, and says for whom; when that one is gone, it goes on."""
    monkeypatch.setattr("tokenmill.jobs.ingest.submit.GROUP_LINES", 1000)
    path = write_jobs(tmp_path / "j", [f"{number} " + "x" * 300 for number in range(5000)])
    how = Submission("m", output="/out")
    with Store(server) as one, Store(server) as other:

        def impatient(words: str) -> None:
            raise InterruptedError(words)

        def meanwhile(_: int) -> None:
            with pytest.raises(
                InterruptedError, match=f"process {os.getpid()} on .* is storing the same jobs; waiting"
            ):
                submit(other, path, how, processes=0, on_wait=impatient)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            submit(one, path, how, processes=0, progress=meanwhile)
        one.close()
        done = submit(other, path, how, processes=0)
        assert done.continued
        assert done.batch.counts == Counts(pending=5000)


def test_half_a_stream_of_one_that_lives_is_kept(server: PostgresAddress) -> None:
    with Store(server) as one:
        one.submissions.begin(Submission("m"), source="stdin", key=None)
        with Store(server) as other:
            assert len(other.batches()) == 1
    with Store(server) as other:
        assert other.batches() == []


def test_a_retry_is_waited_for_where_it_is_ones_own(address: Address, tmp_path: Path) -> None:
    with Store(address) as store:
        one, other, third = (submitted(store, tmp_path / name, [name]) for name in "abc")
        for batch, retry_at_s in ((one, 7.0), (other, 5.0)):
            (job,) = pending(store, batch)
            store.start([job])
            store.fail(job, BROKE, retry_at_s=retry_at_s)
        found = [store.next_retry_s(asked) for asked in (None, [one.id], [one.id, other.id], [third.id], [])]
        assert found == [5.0, 7.0, 5.0, None, None]


def test_a_batch_cancelled_by_another_process_is_told_to_who_works_on_it(
    server: PostgresAddress, tmp_path: Path
) -> None:
    with Store(server) as one, Store(server) as other:
        batch = submitted(one, tmp_path / "j", ["a", "b"])
        jobs = pending(one, batch)
        one.start(jobs[:1])
        assert other.cancel(batch.id) == 2
        assert one.cancel_requests() == [batch.id]
        one.release(jobs[:1])
        assert one.cancel_requests() == []
        assert states(one, batch.id) == ["cancelled", "cancelled"]
