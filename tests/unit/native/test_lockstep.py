"""Steps with a stream per slot, where each is one pass over the weights."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.native.batching import DecodeStep, SequenceJob
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.lockstep import gaps, next_pass
from tokenmill.native.scheduler import StepScheduler

CELLS = 256


class Streams:
    """Lengths of streams, which llama.cpp demands to be continuous."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]

    def copy(self, source: int, target: int, end: int) -> None:
        self.tokens[target] = self.tokens[source][:end]

    def cut(self, sequence: int, start: int) -> None:
        del self.tokens[sequence][start:]

    def decode(self, step: DecodeStep) -> None:
        for work in step.work:
            assert len(self.tokens[work.sequence]) == work.position, "llama.cpp refuses a gap between positions"
            self.tokens[work.sequence] += work.tokens
            assert len(self.tokens[work.sequence]) <= CELLS


def passes(step: DecodeStep) -> int:
    """How many passes over the weights llama.cpp makes: consecutive streams, the same number of tokens each."""
    left = {work.sequence: len(work.tokens) for work in step.work}
    count = 0
    while left:
        first = min(left)
        run = [first]
        while run[-1] + 1 in left:
            run.append(run[-1] + 1)
        tokens = min(left[each] for each in run)
        left = {each: tokens_left - tokens * (each in run) for each, tokens_left in left.items()}
        left = {each: tokens_left for each, tokens_left in left.items() if tokens_left}
        count += 1
    return count


def job(sequence: int, left: int) -> SequenceJob:
    return SequenceJob(
        sequence, array("i", range(left + 1)), left + 1, "batch", "prompt", sequence, sequence, position=1
    )


def best_run(jobs: Sequence[SequenceJob], budget: int) -> int:
    """Prompt tokens of the best pass, by trying all runs."""
    best = 0
    for start in range(len(jobs)):
        for end in range(start + 1, len(jobs) + 1):
            run = jobs[start:end]
            if any(other.sequence != one.sequence + 1 for one, other in pairwise(run)):  # type: ignore[operator]
                break
            tokens = min(len(each.prompt) - each.position for each in run)
            best = max(best, min(tokens, budget // len(run)) * len(run))
    return best


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=12), st.integers(12, 40))
def test_a_pass_advances_as_many_tokens_as_possible(given_: list[tuple[int, int]], budget: int) -> None:
    sequence = 0
    jobs = []
    for step, left in given_:
        sequence += step
        jobs.append(job(sequence, left))
    chosen, count = next_pass(jobs, budget)
    best = best_run(jobs, budget)
    assert len(chosen) * count <= budget
    if best <= len(jobs):
        assert (chosen, count) == (jobs, 1)
    else:
        assert len(chosen) * count == best
        assert all(other.sequence == (one.sequence or 0) + 1 for one, other in pairwise(chosen))
        assert all(len(each.prompt) - each.position >= count for each in chosen)


def test_an_urgent_prompt_is_in_the_pass_even_if_others_are_longer() -> None:
    jobs = [job(0, 50), job(1, 50), job(5, 8)]
    jobs[2].urgent = True
    assert next_pass(jobs, 100) == ([jobs[2]], 8)


def test_gaps_are_the_missing_streams_between_the_first_and_the_last() -> None:
    assert gaps([2, 3, 6, 9]) == [4, 5, 7, 8]
    assert gaps([4]) == gaps([]) == []


JOBS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=40
)


@given(JOBS, st.integers(1, 9), st.sampled_from([16, 64, 300]))
def test_every_step_is_one_pass_and_every_job_ends(
    jobs: list[tuple[int, int, int, bool]], slots: int, ubatch: int
) -> None:
    cells = Streams(slots)
    cache = PrefixCache(cells, total_cells=slots * CELLS, sequences=slots, shares=False, streams=True, least_copied=4)
    scheduler = StepScheduler(
        cache, slots=slots, interactive_slots=0, budget=max(ubatch, slots), ubatch=ubatch, context=CELLS
    )
    scheduler.streams = scheduler.lockstep = True
    scheduler.mixes = False
    left = {}
    for number, (digest, own, output, interactive) in enumerate(jobs):
        prompt = [digest] * 30 + [1000 + number] * own
        scheduler.submit(number, prompt, "interactive" if interactive else "batch")
        left[number] = output
    steps = 0
    while left:
        step = scheduler.plan()
        steps += 1
        assert steps < 5000, "nothing advances"
        assert passes(step) <= 1 or ubatch < slots
        cells.decode(step)
        scheduler.ran(step)
        for work in step.work:
            if work.id is None or not work.logits:
                continue
            assert isinstance(work.id, int)
            left[work.id] -= 1
            if left[work.id]:
                scheduler.token(work.id, 5)
            else:
                del left[work.id]
                scheduler.finish(work.id)
    totals = scheduler.totals
    assert totals.prompt_tokens_computed + totals.prompt_tokens_reused == sum(30 + own for _, own, _, _ in jobs)
    assert totals.running == totals.waiting == 0
