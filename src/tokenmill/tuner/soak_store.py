"""The last soak of each machine and model, in the measurement journal."""

from pathlib import Path

from tokenmill import measurements
from tokenmill.tuner.soak import SoakResult


def save(state: Path, result: SoakResult) -> Path:
    """Store a result instead of the former one; returns the journal's path."""
    measurements.replace(state, "soak", result)
    return measurements.journal_path(state)


def load(state: Path, machine_id: str, model_id: str) -> SoakResult | None:
    """The newest result; None where there is none."""
    results = list(measurements.read(state, "soak", SoakResult, machine_id=machine_id, model_id=model_id))
    return results[-1] if results else None
