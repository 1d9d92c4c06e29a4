"""Repeated trials as one figure, and how far apart repeats lie. Trials that were disturbed or crashed do not count."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from statistics import fmean, median, variance

from tokenmill.tuner.point import Figures, Trial, TrialSettings

ENOUGH = 3  # degrees of freedom that a spread must rest on


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of some dials: the median of each figure over the trials that count."""

    dials: TrialSettings
    figures: Figures
    trials: tuple[Trial, ...]

    @property
    def count(self) -> int:
        """How often it was measured."""
        return len(self.trials)

    def as_trial(self) -> Trial:
        """One trial that stands for all."""
        return replace(
            self.trials[-1],
            figures=self.figures,
            seconds=sum(trial.seconds for trial in self.trials),
            loaded=any(trial.loaded for trial in self.trials),
        )


def standings(trials: Iterable[Trial]) -> tuple[Standing, ...]:
    """One for each dials that have figures, in the order in which they were first tried."""
    by_dials: dict[TrialSettings, list[Trial]] = {}
    for trial in trials:
        if trial.counts:
            by_dials.setdefault(trial.dials, []).append(trial)
    return tuple(Standing(dials, middle([t.figures for t in held]), tuple(held)) for dials, held in by_dials.items())


def middle(measured: Sequence[Figures]) -> Figures:
    """The median of each figure over those that have it."""
    found = {}
    for item in fields(Figures):
        values = [value for value in (getattr(each, item.name) for each in measured) if value is not None]
        if values:
            found[item.name] = round(median(values)) if item.name.endswith("_bytes") else median(values)
    return Figures(**found)


def spread(trials: Iterable[Trial], figure: str = "decode_tok_s") -> float | None:
    """Relative standard deviation of repeats of one figure, all dials together; None: too few repeats to say."""
    squares = 0.0
    freedom = 0
    for standing in standings(trials):
        values = [v for v in (getattr(trial.figures, figure) for trial in standing.trials) if v is not None]
        if len(values) > 1 and fmean(values) > 0:
            squares += variance(values) / fmean(values) ** 2 * (len(values) - 1)
            freedom += len(values) - 1
    return sqrt(squares / freedom) if freedom >= ENOUGH else None
