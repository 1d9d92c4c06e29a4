"""Prefill: a prompt cut into micro-batches, each reading every weight it touches once."""

from collections import defaultdict

from tokenmill.planner.devices import Devices
from tokenmill.planner.plan import Settings, Term
from tokenmill.planner.rates import Rates
from tokenmill.planner.step_time import Step, offload_threshold, step_terms
from tokenmill.planner.work import Work


def prefill_terms(
    work: Work,
    devices: Devices,
    settings: Settings,
    rates: Rates,
    *,
    depth: int,
    prompt: int,
    ubatch: int,
    min_batch: int | None = None,
) -> list[Term]:
    """What a prompt of `prompt` tokens waits for, behind `depth` tokens that are there already."""
    whole, rest = divmod(prompt, ubatch)
    # the cost of attention grows evenly, so the middle of all whole micro-batches stands for each of them
    parts = [(whole, ubatch, depth + whole * ubatch / 2), (1, rest, depth + whole * ubatch + rest / 2)]
    seconds: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    for count, tokens, attended in parts:
        if count == 0 or tokens == 0:
            continue
        threshold = offload_threshold(work, settings, min_batch)
        streams = threshold is not None and tokens >= threshold
        step = Step(tokens=tokens, attended=attended, caches=1, streams=streams, prefill=True)
        for term in step_terms(step, work, devices, devices.prefill, settings, rates):
            seconds[term.name] += count * term.seconds
            moved[term.name] += count * (term.bytes or 0.0)
    return [
        Term(name, value, moved[name] or None, moved[name] / value / 1e9 if moved[name] else None)
        for name, value in seconds.items()
    ]
