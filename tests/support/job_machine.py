"""A state machine that applies any sequence of operations to a store."""

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from support.jobs_store import Clock, answer, submitted
from support.postgres import past
from tokenmill.jobs.models import Failure, JobId, State
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store

BROKE = Failure("engine_died", "the engine died")


class Jobs(RuleBasedStateMachine):
    """Anything in any order: counts are what COUNT says, and an answer never changes."""

    jobs = Bundle("jobs")

    @initialize(target=jobs)
    def begin(self) -> object:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.clock = Clock()
        self.address = self.new_address()
        self.store = Store(self.address, clock=self.clock)
        self.answers: dict[bytes, bytes] = {}
        self.files = 0
        return self._submit(["a", "b", "a"])

    def new_address(self) -> Address:
        return self.path / "s"

    def _submit(self, prompts: list[str]) -> int:
        self.files += 1
        batch = submitted(self.store, self.path / f"j{self.files}", prompts)
        return JobId.of(batch.id, 1)

    @rule(target=jobs, prompts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4))
    def submit_more(self, prompts: list[str]) -> object:
        return self._submit(prompts)

    @rule(job=jobs, offset=st.integers(0, 3))
    def start(self, job: int, offset: int) -> None:
        self.store.start([job + offset, job])

    @rule(job=jobs, text=st.text(max_size=3))
    def commit(self, job: int, text: str) -> None:
        self.store.commit([answer(job, text), answer(job + 1, text)])

    @rule(job=jobs, final=st.booleans())
    def fail(self, job: int, final: bool) -> None:
        self.store.fail(job, BROKE, retry_at_s=None if final else self.clock.now_s)

    @rule(job=jobs)
    def die(self, job: int) -> None:
        self.store.record_crash([job], BROKE, retry_at_s=self.clock.now_s)

    @rule(job=jobs)
    def release(self, job: int) -> None:
        self.store.release([job])

    @rule(job=jobs)
    def cancel(self, job: int) -> None:
        self.store.cancel(JobId.batch(job))

    @rule(job=jobs, cancelled=st.booleans())
    def retry(self, job: int, cancelled: bool) -> None:
        self.store.retry(JobId.batch(job), cancelled=cancelled)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.address, clock=self.clock)
        assert all(batch.counts.running == 0 for batch in self.store.batches())

    @invariant()
    def counts_are_true(self) -> None:
        self.store.flush()
        with past(self.address) as ask:
            counted = ask("SELECT batch, state, count(*) FROM jobs GROUP BY batch, state")
            answers = dict[bytes, bytes](ask("SELECT identity, body FROM answers"))
            (dangling,) = ask("SELECT count(*) FROM jobs WHERE (state = 2) <> (answer IS NOT NULL)")
        kept = {
            (batch.id, state): getattr(batch.counts, state.name.lower())
            for batch in self.store.batches()
            for state in State
        }
        assert {(batch, State(state)): jobs for batch, state, jobs in counted} == {
            key: jobs for key, jobs in kept.items() if jobs
        }
        assert self.answers.items() <= answers.items()
        assert dangling == (0,)
        for batch in self.store.batches():
            assert batch.totals.computed + batch.totals.reused == batch.counts.done
        self.answers = answers

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()
