"""The trials of a search so far, and estimates for untried settings."""

from collections import Counter
from dataclasses import replace
from math import exp, log
from statistics import median, pstdev

from tokenmill.tuner.point import Aim, Figures, Trial, TrialSettings
from tokenmill.tuner.search.noise import Standing, spread, standings
from tokenmill.tuner.search.objectives import Yardstick, choose, yardstick
from tokenmill.tuner.search.space import CacheTypes, Space, cache_bytes, setting

MAX_REPEATS = 2  # per wanted measurement, of disturbed trials
MAX_NOISE = 0.25  # a larger spread means a machine unfit for measuring


class TrialLog:
    """Trials by settings."""

    def __init__(self, space: Space, aim: Aim, noise: float) -> None:
        self._space = space
        self._aim = aim
        self._min_noise = noise
        self.trials: list[Trial] = []
        self._standings: dict[TrialSettings, Standing] = {}
        self._yard = yardstick(aim, ())
        self._disturbed: Counter[TrialSettings] = Counter()
        self._failed: dict[TrialSettings, Trial] = {}
        self.noise = noise

    def add(self, trial: Trial) -> None:
        """Add a trial; outside the space, only its failure is used."""
        if trial.outcome != "measured":
            self._failed[trial.dials] = trial
        if not self._space.holds(trial.dials):
            return
        self.trials.append(trial)
        if trial.disturbed is not None:
            self._disturbed[trial.dials] += 1
        self._standings = {each.dials: each for each in standings(self.trials)}
        self._yard = yardstick(self._aim, self.trials)
        seen = spread(self.trials, self._yard.throughput_figure)
        self.noise = max(self._min_noise, min(seen or 0.0, MAX_NOISE))

    @property
    def yard(self) -> Yardstick:
        """The yardstick for the trials so far."""
        return self._yard

    def worth(self, settings: TrialSettings) -> float | None:
        """Worth of settings; None if they have no figures."""
        found = self._standings.get(settings)
        return None if found is None else self._yard.worth(found.figures)

    def count(self, settings: TrialSettings) -> int:
        """Number of undisturbed measurements."""
        found = self._standings.get(settings)
        return 0 if found is None else found.count

    def figures(self, settings: TrialSettings) -> Figures | None:
        """Median figures of settings."""
        found = self._standings.get(settings)
        return None if found is None else found.figures

    def rank(self, settings: TrialSettings) -> tuple[bool, float]:
        """Sort key, higher is better: whether the aim's time limit is met, then worth."""
        found = self._standings.get(settings)
        worth = None if found is None else self._yard.worth(found.figures)
        return (False, 0.0) if found is None or worth is None else (self._yard.in_time(found.figures), worth)

    def measured(self) -> list[TrialSettings]:
        """All settings with a worth."""
        return [settings for settings in self._standings if self.worth(settings) is not None]

    def best(self) -> Standing | None:
        """The best settings so far."""
        return choose(self._yard, list(self._standings.values()), self.noise)

    def top(self) -> TrialSettings | None:
        """The settings of highest worth, without regard to secondary objectives."""
        return max(self.measured(), key=self.rank, default=None)

    def wants(self, settings: TrialSettings, times: int = 1) -> bool:
        """Whether settings need further trials to reach `times` measurements."""
        if self.count(settings) >= times or self.hopeless(settings):
            return False
        return self._disturbed[settings] <= MAX_REPEATS * times

    def excluded(self, settings: TrialSettings) -> bool:
        """Whether settings must not be tried: outside the space, known to fail, or always disturbed."""
        return not self._space.holds(settings) or not self.wants(settings)

    def hopeless(self, settings: TrialSettings) -> bool:
        """Whether settings failed, or need at least as much memory as settings that failed."""
        if settings in self._failed:
            return True
        ran = self._standings.get(settings)
        return ran is None and any(
            trial.outcome in ("out of memory", "died") and needs_as_much(settings, trial.dials)
            for trial in self._failed.values()
        )

    def ratio(self, base: TrialSettings, name: str, value: object) -> float | None:
        """Relative effect of changing one setting, from the latest trials that differ in nothing else."""
        found = None
        for settings in self._standings:
            if setting(settings, name) != value or (there := self.worth(settings)) is None:
                continue
            here = self.worth(self._space.turned(settings, name, setting(base, name)))
            if here:
                found = there / here
        return found


class Fit:
    """Upper bounds of the worth of untried settings, from a forecast scaled to measurements."""

    MIN_PAIRS = 4  # minimum measurements
    DOUBT = 2.0  # bound in multiples of the spread
    SURE = 0.05  # minimum uncertainty

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        """Pairs of forecast and measured worth."""
        self._most: float | None = None
        if len(pairs) >= self.MIN_PAIRS:
            ratios = [log(measured / predicted) for predicted, measured in pairs]
            self._most = exp(median(ratios) + self.DOUBT * max(pstdev(ratios), self.SURE))

    def at_most(self, predicted: float | None) -> float | None:
        """Upper bound of the worth of settings with this forecast; None if unknown."""
        return None if predicted is None or self._most is None else predicted * self._most


def needs_as_much(settings: TrialSettings, other: TrialSettings) -> bool:
    """Whether settings need at least as much memory as others, because nothing that determines it is smaller."""
    types = _types(settings)
    others = _types(other)
    sizes = cache_bytes(types), cache_bytes(others)
    larger = sizes[0] >= sizes[1] if sizes[0] is not None and sizes[1] is not None else types == others
    alike = replace(
        settings,
        threads=other.threads,
        threads_batch=other.threads_batch,
        sequences=other.sequences,
        ubatch=other.ubatch,
        context=other.context,
        cache_type_k=other.cache_type_k,
        cache_type_v=other.cache_type_v,
    )
    return (
        alike == other
        and larger
        and settings.sequences >= other.sequences
        and settings.ubatch >= other.ubatch
        and settings.context >= other.context
    )


def _types(settings: TrialSettings) -> CacheTypes:
    return settings.cache_type_k, settings.cache_type_v
