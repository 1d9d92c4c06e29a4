"""Decoding: one token of each sequence in every step."""

from tokenmill.planner.devices import Devices
from tokenmill.planner.plan import Settings, Term
from tokenmill.planner.rates import Rates
from tokenmill.planner.step_time import Step, offload_threshold, step_terms
from tokenmill.planner.work import Work


def decode_terms(
    work: Work,
    devices: Devices,
    settings: Settings,
    rates: Rates,
    *,
    depth: int,
    sequences: int,
    min_batch: int | None = None,
) -> list[Term]:
    """What one step waits for, with every sequence `depth` tokens long."""
    threshold = offload_threshold(work, settings, min_batch)
    streams = threshold is not None and sequences >= threshold
    step = Step(tokens=sequences, attended=depth, caches=sequences, streams=streams)
    return step_terms(step, work, devices, devices.decode, settings, rates)
