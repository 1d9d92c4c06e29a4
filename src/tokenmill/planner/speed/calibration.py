"""What a machine's own recorded runs say of the forecast. Values only; `tokenmill.tuner.calibrate` makes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Correction:
    """What recorded runs say of one kind of speed."""

    factor: float = 1.0  # seconds measured over seconds forecast
    spread: float = 0.0  # relative, at settings like those measured; one factor does not mend a curve's shape
    measurements: int = 0
    of: str = "this model"  # what was measured, in words
    last: str | None = None  # ISO 8601: when the newest was made

    @property
    def grounds(self) -> str:
        """How many measurements of what, when, and how sure that makes it."""
        times = f"{self.measurements} measurement{'' if self.measurements == 1 else 's'}"
        last = f", the last of {self.last[:10]}" if self.last else ""
        return f"{times} of {self.of} on this machine{last}; give or take {self.spread:.0%} at settings like those"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this machine's own recorded runs say; the forecast is corrected by it."""

    tier_gb_s: Mapping[str, float] = field(default_factory=dict)  # the most a memory gives, as decoding has shown
    decode: Correction | None = None
    prefill: Correction | None = None
