"""Corrections of the forecast from recorded runs. Values only; `tokenmill.tuner.calibrate` computes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of one kind of speed."""

    factor: float = 1.0  # measured seconds divided by predicted seconds
    spread: float = 0.0  # relative, at similar settings; a single factor cannot correct the shape of a curve
    measurements: int = 0
    of: str = "this model"  # description of the measured model or models
    last: str | None = None  # time of the newest measurement, ISO 8601

    @property
    def grounds(self) -> str:
        """One line for the user: number and subject of the measurements, date and spread."""
        times = f"{self.measurements} measurement{'' if self.measurements == 1 else 's'}"
        last = f", the last of {self.last[:10]}" if self.last else ""
        return f"{times} of {self.of} on this machine{last}; give or take {self.spread:.0%} at settings like those"


@dataclass(frozen=True, slots=True)
class Calibration:
    """All corrections from this machine's recorded runs."""

    tier_gb_s: Mapping[str, float] = field(default_factory=dict)  # highest bandwidth per tier seen while decoding
    decode: Correction | None = None
    prefill: Correction | None = None
