"""Passes of a KV cache with a stream per slot, for engines in which every pass over the weights is expensive.

llama.cpp computes consecutive streams together, with the same number of tokens each. A gap between streams or a longer
prompt costs another pass over all weights, so a step must be exactly one pass:

    stream       0     1     2     3     4     5
    lockstep     tok   tok   pad   tok   tok   tok      one token of every job, of its answer or of its prompt
    prefill                        [ 25 tokens each ]   part of the prompts in consecutive streams

`next_pass` returns the one that advances more tokens. Streams without a job get a padding token, removed afterwards.
"""

from collections.abc import Sequence
from itertools import pairwise

from tokenmill.native.batching import SequenceJob


def next_pass(jobs: Sequence[SequenceJob], budget: int) -> tuple[list[SequenceJob], int]:
    """Return the jobs of the next pass, and the number of tokens of each; `jobs` are sorted by sequence.

    If an urgent job has a prompt to compute, the pass contains it.
    """
    start, end, count = _largest_rectangle(jobs, budget)
    urgent = next((at for at, job in enumerate(jobs) if job.urgent and _left(job) > 1), None)
    if urgent is not None and not start <= urgent < end:
        start, end, count = urgent, urgent + 1, min(_left(jobs[urgent]), budget)
    elif (end - start) * count <= len(jobs) and urgent is None:
        return list(jobs), 1
    return list(jobs[start:end]), count


def gaps(sequences: Sequence[int]) -> list[int]:
    """Return the missing numbers in ascending sequences."""
    return [missing for low, high in pairwise(sequences) for missing in range(low + 1, high)]


def admission_passes(free: int, slots: int, prompt_tokens: int, ubatch: int) -> float:
    """Estimate the passes that computing the prompts of `free` new jobs takes, if free slots are scattered evenly."""
    runs = max(1.0, free * (1 - free / slots))
    return runs * max(1.0, prompt_tokens * free / runs / ubatch)


def _left(job: SequenceJob) -> int:
    """Tokens of the prompt that are not computed."""
    return max(0, len(job.prompt) - job.position)


def _largest_rectangle(jobs: Sequence[SequenceJob], budget: int) -> tuple[int, int, int]:
    """Return start, end and tokens each of the run of consecutive streams that advances most prompt tokens.

    The largest rectangle in a histogram: a stack holds the bars that can still grow to the right.
    """
    best = (0, 0, 0)
    stack: list[tuple[int, int]] = []  # (start, tokens), ascending
    sequence = -2
    for at in range(len(jobs) + 1):
        job = jobs[at] if at < len(jobs) else None
        height = 0 if job is None else min(_left(job), budget)
        consecutive = job is not None and job.sequence == sequence + 1
        start = at
        while stack and (stack[-1][1] > height or not consecutive):
            start, tall = stack.pop()
            width, tall = _within(at - start, tall, budget)
            if width * tall > (best[1] - best[0]) * best[2]:
                best = (start, start + width, tall)
        if not consecutive:
            start = at
        if height and (not stack or stack[-1][1] < height):
            stack.append((start, height))
        sequence = -2 if job is None or job.sequence is None else job.sequence
    return best


def _within(width: int, height: int, budget: int) -> tuple[int, int]:
    """Return width and height of the largest rectangle inside the given one that has at most `budget` tokens."""
    best = (0, 0)
    for tall in range(max(1, min(height, budget // width)), height + 1):
        wide = min(width, budget // tall)
        if wide * tall > best[0] * best[1]:
            best = (wide, tall)
        if wide * tall == min(budget, width * height):
            break
    return best
