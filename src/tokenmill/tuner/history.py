"""Measured and predicted speeds: records of the measurement journal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmill import measurements
from tokenmill.tuner.point import Figures, TrialSettings

Source = Literal["tune", "bench", "run", "soak"]


@dataclass(frozen=True, slots=True)
class SpeedRecord:
    """One measurement."""

    when: str  # ISO 8601, UTC
    machine: str  # name
    machine_id: str
    model: str
    model_id: str
    engine: str  # native, llama-server, ...
    build: str
    source: Source
    dials: TrialSettings
    depth: int  # tokens in a sequence when decoding began
    figures: Figures
    predicted: Figures  # all None without a forecast


def append(state: Path, speed: SpeedRecord) -> None:
    """Store a measurement."""
    measurements.append(state, "speed", speed)


def read(
    state: Path, *, machine_id: str | None = None, model_id: str | None = None, engine: str | None = None
) -> tuple[SpeedRecord, ...]:
    """Stored measurements, oldest first."""
    return tuple(
        measurements.read(state, "speed", SpeedRecord, machine_id=machine_id, model_id=model_id, engine=engine)
    )
