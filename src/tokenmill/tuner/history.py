"""Speeds that were measured, beside what was predicted: one line of JSON each, in `<state>/measured/trials.jsonl`.

Kept as loads are (engine/measured.py): the file only grows, by whole lines under a lock, until it is too long; a line
that cannot be read is passed over. Holds figures, settings and names of machine and model; no prompts, no paths.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tokenmill.engine import measured
from tokenmill.tuner.point import Figures, TrialSettings

Source = Literal["tune", "bench", "run", "soak"]
FILE = Path("measured", "trials.jsonl")


@dataclass(frozen=True, slots=True)
class Speed:
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
    predicted: Figures  # nothing but None where no forecast was made


def append(state: Path, speed: Speed) -> None:
    """Add a measurement, whole or not at all; other processes may do the same at once."""
    measured.append_line(state / FILE, asdict(speed))


def read(state: Path) -> tuple[Speed, ...]:
    """Every measurement that can be read, oldest first."""
    return tuple(measured.read_lines(state / FILE, Speed))
