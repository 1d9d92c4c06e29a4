"""Whatever happens in whatever order: each job is answered once, and never is more in flight than may be."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.prefix_keys import long_key
from tokenmill.engine.engine import Usage
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch, Wait
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape, Reuse

CHUNKS = [b"aaaa", b"bbbb", b"cccc", long_key(b"aaaa"), long_key(b"bbbb")]
JOBS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(CHUNKS), max_size=4).map(b"".join),
        st.none() | st.integers(1, 300),
        st.sampled_from([0, 0, 0, 1, 5]),
        st.none() | st.floats(0, 9000),
    ),
    max_size=12,
)
RATES = st.sampled_from([MeasuredRates(), MeasuredRates(1000.0, ((1, 40.0), (4, 90.0)))])


class NightMachine(RuleBasedStateMachine):
    """A scheduler with everything that can happen to it; what it says is checked against what was done."""

    @initialize(
        reuse=st.sampled_from(["shares", "slots", "prefix cache", "none"]),
        width=st.integers(1, 5),
        slots=st.integers(0, 2),
        cells=st.none() | st.integers(10, 3000),
        window=st.integers(1, 12),
        rates=RATES,
        late=JOBS,
    )
    def begin(
        self,
        reuse: Reuse,
        width: int,
        slots: int,
        cells: int | None,
        window: int,
        rates: MeasuredRates,
        late: list[tuple[bytes, int | None, int, float | None]],
    ) -> None:
        ahead = 2 if reuse == "shares" else 0
        self.shape = EngineShape(reuse, width, width + slots if reuse == "slots" else None, ahead, cells, rates)
        self.scheduler = Scheduler(self.shape, window=window)
        self.width, self.interactive, self.up, self.now_s = width, 0, True, 0.0
        self.jobs: dict[int, Pending] = {}
        self.stream: list[Pending] = []  # stored and not given yet, in head order
        self.given: set[int] = set()  # pending or in flight
        self.flying: dict[int, Dispatch] = {}
        self.warm: set[int] = set()  # in flight, first token seen
        self.answered: list[int] = []
        self.ended: set[int] = set()
        self.store(late)

    @rule(jobs=JOBS)
    def store(self, jobs: list[tuple[bytes, int | None, int, float | None]]) -> None:
        for head, output, priority, deadline_s in jobs:
            job = len(self.jobs)
            own = head + job.to_bytes(4, "big")
            self.jobs[job] = Pending(job, own, 128 * len(own) - 200, output, priority, deadline_s, output)
            self.stream.append(self.jobs[job])
        self.stream.sort(key=lambda record: (-record.priority, record.prefix_key))
        if jobs:
            self.scheduler.reopen_stream()

    @rule()
    def act(self) -> None:
        decisions = self.scheduler.decide()
        assert decisions
        for decision in decisions:
            if isinstance(decision, Fetch):
                page, self.stream = self.stream[: decision.jobs], self.stream[decision.jobs :]
                self.scheduler.available(page, more=bool(self.stream))
                self.given |= {record.job for record in page}
            elif isinstance(decision, Dispatch):
                self.sent(decision)
            else:
                assert isinstance(decision, Wait)
                assert len(decisions) == 1
                assert decision.reason

    def sent(self, sent: Dispatch) -> None:
        assert self.up
        assert sent.job in self.given, "it was never given, or has ended"
        assert sent.job not in self.flying, "it is in flight"
        assert len(self.flying) < max(0, self.width - self.interactive) + self.shape.look_ahead
        assert (sent.slot is not None) == (self.shape.reuse == "slots")
        if sent.slot is not None:
            assert sent.slot not in {other.slot for other in self.flying.values()}
        assert 0 <= sent.expected_bytes <= self.jobs[sent.job].prompt_bytes
        assert (sent.source_job is None) == (sent.expected_bytes == 0)
        if self.shape.reuse == "prefix cache" and sent.source_job in self.flying:
            assert sent.source_job in self.warm, "it should find what is not there yet"
        self.flying[sent.job] = sent

    @precondition(lambda self: self.flying)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["started", "first token", "finished", "finished", "finished", "failed", "again"]),
    )
    def report(self, data: st.DataObject, kind: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.flying)))
        if kind == "started":
            self.scheduler.started(job)
        elif kind == "first token":
            self.scheduler.first_token(job)
            self.warm.add(job)
        else:
            sent = self.flying.pop(job)
            self.warm.discard(job)
            if kind == "finished":
                final = self.scheduler.finished(job, Usage(100, 20, 0))
                assert (final.job, final.slot) == (sent.job, sent.slot)
                assert final.expected_bytes <= sent.expected_bytes
                self.answered.append(job)
            else:
                self.scheduler.failed(job, again=kind == "again")
            if kind != "again":
                self.given.discard(job)
                self.ended.add(job)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        jobs = data.draw(st.lists(st.sampled_from(sorted(self.given)), max_size=3, unique=True))
        self.scheduler.withdraw(jobs)
        for job in jobs:
            self.given.discard(job)
            self.flying.pop(job, None)
            self.warm.discard(job)
            self.ended.add(job)

    @rule()
    def die(self) -> None:
        lost = self.scheduler.engine_lost()
        assert set(lost) == set(self.flying)
        self.flying.clear()
        self.warm.clear()
        self.up = False

    @rule()
    def come_back(self) -> None:
        self.scheduler.engine_back()
        self.up = True

    @rule(running=st.sampled_from([0, 0, 1, 9]), forward_s=st.floats(0, 3000))
    def change(self, running: int, forward_s: float) -> None:
        self.scheduler.set_interactive(running)
        self.interactive = running
        self.now_s += forward_s
        self.scheduler.advance_clock(self.now_s)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "scheduler"):
            assert set(self.scheduler.in_flight) == set(self.flying)
            assert self.scheduler.pending == len(self.given) - len(self.flying)
            assert len(self.answered) == len(set(self.answered))

    def teardown(self) -> None:
        """When nothing happens any more but answers, all jobs end."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.engine_back()
        self.up = True
        self.scheduler.set_interactive(0)
        self.interactive = 0
        if self.stream:
            self.scheduler.reopen_stream()
        for _ in range(10 * len(self.jobs) + 10):
            self.act()
            for job in tuple(self.flying):
                self.scheduler.finished(job, Usage(100, 20, 0))
                del self.flying[job]
                self.given.discard(job)
                self.answered.append(job)
                self.ended.add(job)
            if self.ended == set(self.jobs):
                break
        self.counts_agree()
        assert self.ended == set(self.jobs), "some were never sent"


TestNight = NightMachine.TestCase
TestNight.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
