"""Aggregates repeated trials and estimates their spread. Disturbed and failed trials are ignored."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from statistics import fmean, median, variance

from tokenmill.tuner.point import Figures, Trial, TrialSettings

ENOUGH = 3  # minimum degrees of freedom of a spread


@dataclass(frozen=True, slots=True)
class Standing:
    """Median of each figure over the valid trials of the same settings."""

    dials: TrialSettings
    figures: Figures
    trials: tuple[Trial, ...]

    @property
    def count(self) -> int:
        """Number of measurements."""
        return len(self.trials)

    def as_trial(self) -> Trial:
        """One trial with the median figures."""
        return replace(
            self.trials[-1],
            figures=self.figures,
            seconds=sum(trial.seconds for trial in self.trials),
            loaded=any(trial.loaded for trial in self.trials),
        )


def standings(trials: Iterable[Trial]) -> tuple[Standing, ...]:
    """The standing of all settings with figures, in order of their first measurement."""
    by_settings: dict[TrialSettings, list[Trial]] = {}
    for trial in trials:
        if trial.counts:
            by_settings.setdefault(trial.dials, []).append(trial)
    return tuple(
        Standing(settings, middle([t.figures for t in held]), tuple(held)) for settings, held in by_settings.items()
    )


def middle(measured: Sequence[Figures]) -> Figures:
    """The median of each figure over the trials that have it."""
    found = {}
    for item in fields(Figures):
        values = [value for value in (getattr(each, item.name) for each in measured) if value is not None]
        if values:
            found[item.name] = round(median(values)) if item.name.endswith("_bytes") else median(values)
    return Figures(**found)


def spread(trials: Iterable[Trial], figure: str = "decode_tok_s") -> float | None:
    """Relative standard deviation of repeats of a figure, pooled over all settings; None with too few repeats."""
    squares = 0.0
    freedom = 0
    for standing in standings(trials):
        values = [v for v in (getattr(trial.figures, figure) for trial in standing.trials) if v is not None]
        if len(values) > 1 and fmean(values) > 0:
            squares += variance(values) / fmean(values) ** 2 * (len(values) - 1)
            freedom += len(values) - 1
    return sqrt(squares / freedom) if freedom >= ENOUGH else None
