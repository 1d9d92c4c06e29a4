"""Jobs submitted and cancelled in any order all end, with the same result as alone."""

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.kv_cells import SchedulerHarness, next_token
from tokenmill.engine.engine import Priority
from tokenmill.native.kv.prefix_cache import KeepPolicy

HEADS = [[1] * 30, [1] * 6 + [2] * 20, [0, 1, 2] * 9]


class MillMachine(RuleBasedStateMachine):
    """A schedule on tiny caches. The mill itself checks every step: budget, positions, content, cells counted."""

    @initialize(
        cells=st.integers(8, 60),
        slots=st.integers(1, 5),
        interactive_slots=st.integers(0, 2),
        budget=st.integers(1, 20),
        ubatch=st.integers(1, 20),
        spare_ids=st.integers(0, 6),
        shares=st.integers(0, 5).map(bool),
        cuts=st.booleans(),
        context=st.none() | st.integers(6, 40),
        mixes=st.booleans(),
    )
    def begin(
        self,
        cells: int,
        slots: int,
        interactive_slots: int,
        budget: int,
        ubatch: int,
        spare_ids: int,
        shares: bool,
        cuts: bool,
        context: int | None,
        mixes: bool,
    ) -> None:
        self.limit = min(context or cells, cells)
        self.harness = SchedulerHarness(
            cells,
            slots=slots,
            interactive_slots=interactive_slots,
            budget=budget,
            ubatch=ubatch,
            context=context,
            shares=shares,
            cuts=cuts,
            sequences=slots + interactive_slots + spare_ids,
        )
        self.harness.schedule.mixes = mixes
        self.submitted = 0
        self.tokens = 0  # of all prompts and answers: what would be computed without sharing and preemption
        self.interactive: set[int] = set()

    @rule(
        head=st.sampled_from(HEADS),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 2), max_size=8),
        answer=st.integers(1, 20),
        priority=st.sampled_from(["batch", "batch", "interactive"]),
        keep=st.sampled_from([None, None, "nothing", "prompt", "all"]),
    )
    def submit(
        self, head: list[int], shared: int, tail: list[int], answer: int, priority: Priority, keep: KeepPolicy | None
    ) -> None:
        prompt = (head[:shared] + tail or [0])[: self.limit]
        self.harness.submit(self.submitted, prompt, answer, priority, keep)
        if priority == "interactive":
            self.interactive.add(self.submitted)
        self.submitted += 1
        self.tokens += len(prompt) + answer

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            interactive = {number for number in self.interactive if number in self.harness.jobs}
            ran_before = {job.id for job in self.harness.schedule._running.values()}
            long_way = deepcopy(self.harness.schedule)
            long_way._plan_decodes = list  # type: ignore[method-assign]
            expected = long_way.plan()
            step = self.harness.step()
            assert step == expected, "the short way of most steps leads elsewhere"
            if any(work.id not in ran_before and work.id not in self.interactive for work in step.work):
                waiting = self.harness.schedule._queues["interactive"]
                assert all(job.follows or job.id in step.preempted for job in waiting), "a batch job entered first"
            served = {work.id for work in step.work} | set(step.exhausted)
            for preempted in step.preempted:
                assert isinstance(preempted, int)
                older = served & set(range(preempted))
                if preempted in interactive:
                    assert older & interactive, "an interactive job yielded to a batch job or to a younger one"
                else:
                    assert older or interactive, "the oldest yielded"

    @precondition(lambda self: self.harness.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.harness.jobs)))
        before = self.harness.cache.used
        self.harness.cancel(number)
        assert self.harness.cache.used <= before
        assert self.harness.cache.used == self.harness.cells.used

    @rule(slots=st.integers(1, 5))
    def change_lanes(self, slots: int) -> None:
        self.harness.schedule.slots = min(slots, self.harness.cache.sequences - self.harness.schedule.interactive_slots)

    @invariant()
    def lanes_are_kept(self) -> None:
        if hasattr(self, "harness"):
            totals = self.harness.schedule.totals
            assert totals.running + totals.waiting == len(self.harness.jobs)
            assert totals.running <= self.harness.cache.sequences

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run(most_steps=20 + 10 * self.tokens)
        for job in self.harness.done.values():
            assert job.spent is not None
            assert job.answer == _alone(job.prompt, len(job.answer))
            if job.cut_short:
                assert len(job.prompt) + len(job.answer) == self.limit + 1, "ended with room left"
            else:
                assert len(job.answer) == job.answer_tokens
                assert job.spent.reused + job.spent.computed == len(job.prompt)
        assert self.harness.cache.make_room(self.harness.cache.total_cells)
        assert self.harness.cells.used == 0


def _alone(prompt: list[int], count: int) -> list[int]:
    content = list(prompt)
    for _ in range(count):
        content.append(next_token(content))
    return content[len(prompt) :]


TestMill = MillMachine.TestCase
TestMill.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
