"""Stores a soak: the result per machine and model, and its steps as speeds in the history."""

from dataclasses import replace
from pathlib import Path

from tokenmill import measurements
from tokenmill.launch.binding import HOST_TIERS
from tokenmill.planner.placement import fingerprint
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import decode_speed
from tokenmill.tuner.bench.run import last_part, trial_settings_of
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, PointScope
from tokenmill.tuner.soak.judge import MemoryReading, SoakResult, SoakStep


def speed_of(step: SoakStep, place: PointScope, plan: Plan, when: str) -> SpeedRecord:
    """A step as a speed record."""
    write = decode_speed(
        plan.machine,
        plan.profile,
        plan.settings,
        plan.placement,
        depth=step.depth,
        sequences=step.sequences,
        calibration=plan.calibration,
    )
    alike = step.sequences == 1 and last_part(step.computed_tokens or 0, step.depth, plan.settings.ubatch)
    measured = Figures(
        decode_tok_s=step.decode_tok_s,
        prefill_tok_s=step.prefill_tok_s if alike else None,
        host_bytes=_sum(step, "measured_bytes", host=True),
        gpu_bytes=_sum(step, "measured_bytes", host=False),
    )
    predicted = Figures(
        decode_tok_s=write.tok_s if write is not None else None,
        host_bytes=_sum(step, "predicted_bytes", host=True),
        gpu_bytes=_sum(step, "predicted_bytes", host=False),
    )
    where = fingerprint(plan.profile, plan.placement)
    return SpeedRecord(
        when,
        place.machine,
        place.machine_id,
        place.model,
        place.model_id,
        place.engine,
        place.build,
        "soak",
        replace(trial_settings_of(plan.settings), sequences=step.sequences, placement=where),
        step.depth,
        measured,
        predicted,
    )


def _sum(step: SoakStep, name: str, *, host: bool) -> int | None:
    """The sum over all memories of one kind; None if one is unknown."""
    sizes = [_size(reading, name) for reading in step.memory if (reading.tier in HOST_TIERS) == host]
    return None if not sizes or None in sizes else sum(size or 0 for size in sizes)


def _size(reading: MemoryReading, name: str) -> int | None:
    value = getattr(reading, name)
    return value if isinstance(value, int) else None


def save(state: Path, result: SoakResult) -> Path:
    """Store a result instead of the former one; returns the journal's path."""
    measurements.replace(state, "soak", result)
    return measurements.journal_path(state)


def load(state: Path, machine_id: str, model_id: str) -> SoakResult | None:
    """The newest result, or None."""
    results = list(measurements.read(state, "soak", SoakResult, machine_id=machine_id, model_id=model_id))
    return results[-1] if results else None
