"""Corrections of the forecast, computed from recorded runs by `tokenmill.tuner.calibrate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction of decode or prefill speed."""

    factor: float = 1.0  # measured seconds divided by predicted seconds
    spread: float = 0.0  # relative error that remains at similar settings
    measurements: int = 0
    of: str = "this model"  # the measured model or models, in words
    last: str | None = None  # time of the newest measurement, ISO 8601

    @property
    def grounds(self) -> str:
        """The measurements behind the correction in one line: number, model, date and spread."""
        times = f"{self.measurements} measurement{'' if self.measurements == 1 else 's'}"
        last = f", latest {self.last[:10]}" if self.last else ""
        return f"{times} of {self.of} on this machine{last}, within {self.spread:.0%} at similar settings"


@dataclass(frozen=True, slots=True)
class Calibration:
    """All corrections from this machine's recorded runs."""

    tier_gb_s: Mapping[str, float] = field(default_factory=dict)  # highest bandwidth per tier seen while decoding
    decode: Correction | None = None
    prefill: Correction | None = None
