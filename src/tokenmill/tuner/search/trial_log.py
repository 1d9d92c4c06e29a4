"""All recorded trials of a search, and estimates for untried settings."""

from collections import Counter
from dataclasses import replace
from math import exp, log
from statistics import median, pstdev

from tokenmill.tuner.point import Aim, Figures, Trial, TrialSettings
from tokenmill.tuner.search.noise import Standing, spread, standings
from tokenmill.tuner.search.objectives import Yardstick, choose, yardstick
from tokenmill.tuner.search.space import CacheTypes, Space, cache_bytes, setting

AGAIN = 2  # maximum repeats of disturbed settings
WILDEST = 0.25  # a larger spread means that the machine is unfit for measuring, not that everything is equal


class TrialLog:
    """Trials by settings. Only `add` changes it."""

    def __init__(self, space: Space, aim: Aim, noise: float) -> None:
        self._space = space
        self._aim = aim
        self._least_noise = noise
        self.trials: list[Trial] = []
        self._standings: dict[TrialSettings, Standing] = {}
        self._yard = yardstick(aim, ())
        self._disturbed: Counter[TrialSettings] = Counter()
        self._crashed: dict[TrialSettings, Trial] = {}
        self.noise = noise

    def add(self, trial: Trial) -> None:
        """Add a trial; outside the space only failures are informative."""
        if trial.outcome != "measured":
            self._crashed[trial.dials] = trial
        if not self._space.holds(trial.dials):
            return
        self.trials.append(trial)
        if trial.disturbed is not None:
            self._disturbed[trial.dials] += 1
        self._standings = {each.dials: each for each in standings(self.trials)}
        self._yard = yardstick(self._aim, self.trials)
        seen = spread(self.trials, self._yard.throughput_figure)
        self.noise = max(self._least_noise, min(seen or 0.0, WILDEST))

    @property
    def yard(self) -> Yardstick:
        """How trials are judged, given the figures they have."""
        return self._yard

    def worth(self, dials: TrialSettings) -> float | None:
        """Worth of settings; None without figures."""
        found = self._standings.get(dials)
        return None if found is None else self._yard.worth(found.figures)

    def count(self, dials: TrialSettings) -> int:
        """Number of undisturbed measurements."""
        found = self._standings.get(dials)
        return 0 if found is None else found.count

    def figures(self, dials: TrialSettings) -> Figures | None:
        """Median figures of settings."""
        found = self._standings.get(dials)
        return None if found is None else found.figures

    def rank(self, dials: TrialSettings) -> tuple[bool, float]:
        """Sort key, higher is better: whether the aim's time limit is met, then worth."""
        found = self._standings.get(dials)
        worth = None if found is None else self._yard.worth(found.figures)
        return (False, 0.0) if found is None or worth is None else (self._yard.in_time(found.figures), worth)

    def measured(self) -> list[TrialSettings]:
        """All settings with a worth."""
        return [dials for dials in self._standings if self.worth(dials) is not None]

    def best(self) -> Standing | None:
        """The best settings so far."""
        return choose(self._yard, list(self._standings.values()), self.noise)

    def top(self) -> TrialSettings | None:
        """The settings of highest worth, before the aim trades any of it."""
        return max(self.measured(), key=self.rank, default=None)

    def wants(self, dials: TrialSettings, times: int = 1) -> bool:
        """Whether settings need further trials to reach `times` measurements."""
        if self.count(dials) >= times or self.hopeless(dials):
            return False
        return self._disturbed[dials] <= AGAIN * times

    def shut(self, dials: TrialSettings) -> bool:
        """Whether a trial is useless: outside the space, known to fail, or always disturbed."""
        return not self._space.holds(dials) or not self.wants(dials)

    def hopeless(self, dials: TrialSettings) -> bool:
        """Whether they crashed, or need at least as much memory as settings that did."""
        if dials in self._crashed:
            return True
        ran = self._standings.get(dials)
        return ran is None and any(
            trial.outcome in ("out of memory", "died") and needs_as_much(dials, trial.dials)
            for trial in self._crashed.values()
        )

    def ratio(self, base: TrialSettings, dial: str, value: object) -> float | None:
        """Effect of changing one setting on worth elsewhere, by the latest trials that differ in nothing else."""
        found = None
        for dials in self._standings:
            if setting(dials, dial) != value or (there := self.worth(dials)) is None:
                continue
            here = self.worth(self._space.turned(dials, dial, setting(base, dial)))
            if here:
                found = there / here
        return found


class Fit:
    """A forecast scaled to measurements, which bounds the worth of untried settings."""

    LEAST = 4  # minimum measurements
    DOUBT = 2.0  # bound in multiples of the spread
    SURE = 0.05  # minimum uncertainty

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        """Pairs of forecast and measured worth."""
        self._most: float | None = None
        if len(pairs) >= self.LEAST:
            ratios = [log(measured / said) for said, measured in pairs]
            self._most = exp(median(ratios) + self.DOUBT * max(pstdev(ratios), self.SURE))

    def at_most(self, said: float | None) -> float | None:
        """Upper bound of the worth of settings with this forecast; None: unknown."""
        return None if said is None or self._most is None else said * self._most


def needs_as_much(dials: TrialSettings, other: TrialSettings) -> bool:
    """Whether settings certainly need at least as much memory as others: nothing that memory grows with is smaller."""
    types = _types(dials)
    others = _types(other)
    sizes = cache_bytes(types), cache_bytes(others)
    larger = sizes[0] >= sizes[1] if sizes[0] is not None and sizes[1] is not None else types == others
    alike = replace(
        dials,
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
        and dials.sequences >= other.sequences
        and dials.ubatch >= other.ubatch
        and dials.context >= other.context
    )


def _types(dials: TrialSettings) -> CacheTypes:
    return dials.cache_type_k, dials.cache_type_v
