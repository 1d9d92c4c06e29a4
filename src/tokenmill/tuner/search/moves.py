"""Steps of a search: along one setting, around a point, at corners, and repeats where noise decides.

Each is a generator that yields the settings to measure and returns the best that it found. Settings with figures in the
log are not requested again. The points of a step share one load, unless the caller changed it.
"""

from collections.abc import Callable, Generator, Iterable
from math import sqrt

from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.search.curves import WorthCurve, bound, probe
from tokenmill.tuner.search.space import ORDERED, RELOAD, Space, cache_bytes, setting
from tokenmill.tuner.search.trial_log import Fit, TrialLog

Asking = Generator[list[TrialSettings], None, None]
Leading = Generator[list[TrialSettings], None, TrialSettings]
Forecast = Callable[[TrialSettings], float | None]

ROUNDS = 4  # maximum rounds of climbing
INTERACT = 0.15  # tolerance for the interaction of two settings
CONTENDERS = 4  # settings near the best that are repeated
SURE = 1.5  # standard deviations that separate two distinguishable settings
TIMES = 3  # maximum measurements of a contender
STRIDES = 8  # strides along a setting with many values
GAPS = {"sequences": 4.0, "threads": 2.0, "ubatch": 4.0, "threads_batch": 2.0, "context": 8.0}


class TrialsSpent(Exception):
    """The budget for exploration is spent; caught by `Search`."""


class Moves:
    """The steps of a search. Its only state is `reason` and `exploring`; figures come from `trial_log`."""

    def __init__(
        self, space: Space, trial_log: TrialLog, forecast: Forecast | None, may_explore: Callable[[], bool]
    ) -> None:
        self.space = space
        self.trial_log = trial_log
        self.forecast = forecast
        self.may_explore = may_explore
        self.reason = "starts with the plan's own settings"
        self.exploring = True  # leave the trials that are reserved for repeats

    def measure(self, points: Iterable[TrialSettings], times: int = 1) -> Asking:
        """Request measurements, and repeat disturbed ones; settings outside the space are skipped."""
        held = [settings for settings in dict.fromkeys(points) if self.space.holds(settings)]
        while wanting := [settings for settings in held if self.trial_log.wants(settings, times)]:
            if self.exploring and not self.may_explore():
                raise TrialsSpent
            yield wanting

    def better(self, base: TrialSettings, *others: TrialSettings) -> TrialSettings:
        """The best of these; `base` unless another wins by more than half the noise."""
        in_time, worth = self.trial_log.rank(base)
        best = base
        most = (in_time, worth * (1 + self.trial_log.noise / 2))
        for settings in others:
            if self.trial_log.rank(settings) > most:
                best = settings
                most = self.trial_log.rank(settings)
        return best

    def climb(self, base: TrialSettings, *, skipped: str | None = None, anew: bool = True) -> Leading:
        """Optimize one setting after the other until nothing improves.

        `anew=False`: only check the neighbours, because all settings were already explored near this point.
        """
        for number in range(ROUNDS):
            before = base
            for name in self.space.free:
                if name != skipped:
                    base = yield from (self.along(base, name) if anew and number == 0 else self.near(base, name))
            base = yield from self.corners(base)
            base = yield from self.smaller_caches(base)
            if base == before:
                break
        return base

    def along(self, base: TrialSettings, name: str) -> Leading:
        """The best value of one setting, with the others fixed."""
        trial_log = self.trial_log
        self.reason = f"exploring {words(name)}"
        points = {value: self.space.turned(base, name, value) for value in self.space.values(name)}
        if name not in ORDERED:
            yield from self.measure(points.values())
            return self.better(base, *points.values())
        while True:
            seen = {value: worth for value, there in points.items() if (worth := trial_log.worth(there)) is not None}
            excluded = frozenset(
                value for value, there in points.items() if value not in seen and trial_log.excluded(there)
            )
            line = WorthCurve(tuple(points), seen, excluded, GAPS[name], from_first=name == "sequences")
            best = max((trial_log.rank(points[value]) for value in seen), default=(False, 0.0))
            value = probe(line, best[1] * (1 + trial_log.noise / 2), self._guess(points))
            if value is None:
                return self.better(base, *points.values())
            yield from self.measure([points[value]])

    def near(self, base: TrialSettings, name: str) -> Leading:
        """Check the neighbouring values of a setting after others changed; explore all values if a neighbour wins."""
        self.reason = f"checking {words(name)} again with the other settings changed"
        if name in ORDERED:
            there = [stepped(self.space, base, name, steps) for steps in (-1, 1)]
        else:
            there = [self.space.turned(base, name, value) for value in self.space.values(name)]
        likely = [settings for settings in there if self._could_win(base, settings, (name,))]
        yield from self.measure(likely)
        best = self.better(base, *likely)
        if best == base or name not in ORDERED:
            return best
        return (yield from self.along(best, name))

    def corners(self, base: TrialSettings) -> Leading:
        """Change threads and sequences together, because the pair may gain where each alone does not."""
        pair = ("sequences", "threads")
        if not {*pair} <= {*self.space.free}:
            return base
        self.reason = "checking threads and sequences together"
        while True:
            there = [
                stepped(self.space, stepped(self.space, base, "sequences", one), "threads", other)
                for one, other in ((1, 1), (1, -1), (-1, 1))
            ]
            likely = [
                settings
                for settings in there
                if settings.sequences != base.sequences
                and settings.threads != base.threads
                and self._could_win(base, settings, pair)
            ]
            yield from self.measure(likely)
            best = self.better(base, *likely)
            if best == base:
                return base
            base = best

    def smaller_caches(self, base: TrialSettings) -> Leading:
        """Try smaller cache types if only memory prevents more sequences."""
        points = {count: self.space.turned(base, "sequences", count) for count in self.space.sequences}
        seen = {count: worth for count, there in points.items() if (worth := self.trial_log.worth(there)) is not None}
        line = WorthCurve(tuple(points), seen)
        bar = self.trial_log.rank(base)[1] * (1 + self.trial_log.noise)
        kept_out = [c for c in points if c > base.sequences and c not in seen and self.trial_log.excluded(points[c])]
        if not any(bound(line, count) > bar for count in kept_out):
            return base
        self.reason = "trying smaller cache types to make room for more sequences"
        size = cache_bytes(setting(base, "cache_types"))
        best = base
        for types in self.space.cache_types:
            less = cache_bytes(types)
            if size is not None and less is not None and less < size:
                there = self.space.turned(base, "cache_types", types)
                yield from self.measure([there])
                if self.trial_log.worth(there) is not None:
                    best = self.better(best, (yield from self.along(there, "sequences")))
        return best

    def neighbours(self, base: TrialSettings) -> Asking:
        """Try the adjacent values of the most important settings, because small gains add up."""
        self.reason = "trying the values next to the best"
        there = [stepped(self.space, base, name, steps, stride=1) for name in ORDERED[:3] for steps in (-1, 1)]
        noise = 2 * self.trial_log.noise
        yield from self.measure(
            settings
            for settings in there
            if all(
                (self.trial_log.ratio(base, name, setting(settings, name)) or 1.0) > 1 - noise for name in ORDERED[:3]
            )
        )

    def settle(self, load: TrialSettings) -> Asking:
        """Repeat the settings within noise of the best that need no other load, so that noise does not decide."""
        self.reason = "repeating settings within noise of the best"
        exploring = self.exploring
        self.exploring = False
        for times in range(2, TIMES + 1):
            for _ in range(CONTENDERS):
                choice = self.trial_log.best()
                asked = len(self.trial_log.trials)
                chosen = [choice.dials] if choice is not None and same_load(choice.dials, load) else []
                yield from self.measure([*chosen, *self._contenders(load)], times)
                if asked == len(self.trial_log.trials):
                    break
            if len(self._contenders(load)) < 2:
                break
        self.exploring = exploring

    def _contenders(self, load: TrialSettings) -> list[TrialSettings]:
        """The settings that differ from the best by no more than noise."""
        trial_log = self.trial_log
        ranked = sorted(trial_log.measured(), key=trial_log.rank, reverse=True)[:CONTENDERS]
        if not ranked:
            return []
        (in_time, top), often = trial_log.rank(ranked[0]), trial_log.count(ranked[0])
        return [
            settings
            for settings in ranked
            if trial_log.rank(settings)
            >= (in_time, top * (1 - SURE * trial_log.noise * sqrt(1 / often + 1 / trial_log.count(settings))))
            and same_load(settings, load)
        ]

    def _could_win(self, base: TrialSettings, there: TrialSettings, names: Iterable[str]) -> bool:
        """Whether changing these settings could win, estimated from their effect elsewhere with a tolerance."""
        product = 1.0
        for name in names:
            product *= self.trial_log.ratio(base, name, setting(there, name)) or 1.0
        return product * (1 + INTERACT) > 1 + self.trial_log.noise

    def _guess(self, points: dict[int, TrialSettings]) -> Callable[[int], float | None] | None:
        """Upper bounds from the forecast, fitted to all measurements."""
        if self.forecast is None:
            return None
        forecast = self.forecast
        pairs = []
        for settings in self.trial_log.measured():
            predicted = forecast(settings)
            worth = self.trial_log.worth(settings)
            if predicted and worth:
                pairs.append((predicted, worth))
        fit = Fit(pairs)
        return lambda value: fit.at_most(forecast(points[value]))


def same_load(settings: TrialSettings, other: TrialSettings) -> bool:
    """Whether both settings can use the same loaded weights."""
    return all(setting(settings, name) == setting(other, name) for name in RELOAD)


def stepped(space: Space, settings: TrialSettings, name: str, steps: int, stride: int | None = None) -> TrialSettings:
    """One setting moved by some strides; unchanged beyond the end of its values."""
    values = space.values(name)
    if setting(settings, name) not in values:
        return settings
    at = values.index(setting(settings, name)) + steps * (stride or max(1, len(values) // STRIDES))
    return space.turned(settings, name, values[at]) if 0 <= at < len(values) else settings


def words(name: str) -> str:
    """Display name of a setting."""
    return name.replace("_", " ")
