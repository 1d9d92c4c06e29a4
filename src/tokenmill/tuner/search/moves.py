"""Steps of a search: along one setting, around a point, at corners, and repeats where noise decides.

Each is a generator that yields the settings it needs figures for and returns the best it found. Figures that the log
already has are not requested. Points of a step share one load, except differences that the caller made.
"""

from collections.abc import Callable, Generator, Iterable
from math import sqrt

from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.search.curves import WorthCurve, bound, probe
from tokenmill.tuner.search.space import ORDERED, RELOAD, Space, cache_bytes, setting
from tokenmill.tuner.search.trial_log import Fit, TrialLog

Asking = Generator[list[TrialSettings], None, None]
Leading = Generator[list[TrialSettings], None, TrialSettings]
Says = Callable[[TrialSettings], float | None]

ROUNDS = 4  # maximum rounds of climbing
INTERACT = 0.15  # tolerance for the interaction of two settings
CONTENDERS = 4  # settings near the best that are repeated
SURE = 1.5  # standard deviations that separate two distinguishable settings
TIMES = 3  # maximum measurements of a contender
STRIDES = 8  # number of strides along a setting with many values
GAPS = {"sequences": 4.0, "threads": 2.0, "ubatch": 4.0, "threads_batch": 2.0, "context": 8.0}


class TrialsSpent(Exception):
    """The budget for exploration is spent. Caught within the search."""


class Moves:
    """The steps of a search over a space. Only `reason` and `exploring` change; figures come from `trial_log`."""

    def __init__(self, space: Space, trial_log: TrialLog, says: Says | None, may_explore: Callable[[], bool]) -> None:
        self.space = space
        self.trial_log = trial_log
        self.says = says
        self.may_explore = may_explore
        self.reason = "begins with the plan's own settings"
        self.exploring = True  # keep the trials reserved for repeats

    def measure(self, points: Iterable[TrialSettings], times: int = 1) -> Asking:
        """Request measurements, repeating disturbed ones; settings that cannot run are skipped."""
        held = [dials for dials in dict.fromkeys(points) if self.space.holds(dials)]
        while wanting := [dials for dials in held if self.trial_log.wants(dials, times)]:
            if self.exploring and not self.may_explore():
                raise TrialsSpent
            yield wanting

    def better(self, base: TrialSettings, *others: TrialSettings) -> TrialSettings:
        """The best of these; `base` unless another wins by more than half the noise."""
        in_time, worth = self.trial_log.rank(base)
        best = base
        most = (in_time, worth * (1 + self.trial_log.noise / 2))
        for dials in others:
            if self.trial_log.rank(dials) > most:
                best = dials
                most = self.trial_log.rank(dials)
        return best

    def climb(self, base: TrialSettings, *, skipped: str | None = None, anew: bool = True) -> Leading:
        """Optimise one setting after the other, then the neighbourhood, until nothing improves.

        `anew=False`: all settings were already explored near this point.
        """
        for number in range(ROUNDS):
            before = base
            for dial in self.space.free:
                if dial != skipped:
                    base = yield from (self.along(base, dial) if anew and number == 0 else self.near(base, dial))
            base = yield from self.corners(base)
            base = yield from self.roomier(base)
            if base == before:
                break
        return base

    def along(self, base: TrialSettings, dial: str) -> Leading:
        """The best point along one setting."""
        trial_log = self.trial_log
        self.reason = f"looks along {words(dial)}"
        points = {value: self.space.turned(base, dial, value) for value in self.space.values(dial)}
        if dial not in ORDERED:
            yield from self.measure(points.values())
            return self.better(base, *points.values())
        while True:
            seen = {value: worth for value, there in points.items() if (worth := trial_log.worth(there)) is not None}
            shut = frozenset(value for value, there in points.items() if value not in seen and trial_log.shut(there))
            line = WorthCurve(tuple(points), seen, shut, GAPS[dial], from_first=dial == "sequences")
            best = max((trial_log.rank(points[value]) for value in seen), default=(False, 0.0))
            value = probe(line, best[1] * (1 + trial_log.noise / 2), self._guess(points))
            if value is None:
                return self.better(base, *points.values())
            yield from self.measure([points[value]])

    def near(self, base: TrialSettings, dial: str) -> Leading:
        """Check a setting's neighbours again after the others changed; explore all its values if a neighbour wins."""
        self.reason = f"checks {words(dial)} where the other dials led"
        if dial in ORDERED:
            there = [stepped(self.space, base, dial, steps) for steps in (-1, 1)]
        else:
            there = [self.space.turned(base, dial, value) for value in self.space.values(dial)]
        likely = [dials for dials in there if self._could_win(base, dials, (dial,))]
        yield from self.measure(likely)
        best = self.better(base, *likely)
        if best == base or dial not in ORDERED:
            return best
        return (yield from self.along(best, dial))

    def corners(self, base: TrialSettings) -> Leading:
        """Change threads and sequences together, because both may gain where each alone does not."""
        pair = ("sequences", "threads")
        if not {*pair} <= {*self.space.free}:
            return base
        self.reason = "checks threads and sequences together"
        while True:
            there = [
                stepped(self.space, stepped(self.space, base, "sequences", one), "threads", other)
                for one, other in ((1, 1), (1, -1), (-1, 1))
            ]
            likely = [
                dials
                for dials in there
                if dials.sequences != base.sequences
                and dials.threads != base.threads
                and self._could_win(base, dials, pair)
            ]
            yield from self.measure(likely)
            best = self.better(base, *likely)
            if best == base:
                return base
            base = best

    def roomier(self, base: TrialSettings) -> Leading:
        """Try smaller cache types if only memory prevents more sequences."""
        points = {count: self.space.turned(base, "sequences", count) for count in self.space.sequences}
        seen = {count: worth for count, there in points.items() if (worth := self.trial_log.worth(there)) is not None}
        line = WorthCurve(tuple(points), seen)
        bar = self.trial_log.rank(base)[1] * (1 + self.trial_log.noise)
        kept_out = [c for c in points if c > base.sequences and c not in seen and self.trial_log.shut(points[c])]
        if not any(bound(line, count) > bar for count in kept_out):
            return base
        self.reason = "tries whether smaller caches leave room for more sequences"
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

    def beside(self, base: TrialSettings) -> Asking:
        """Try adjacent values of the most important settings, whose small gains add up."""
        self.reason = "looks right beside the best"
        there = [stepped(self.space, base, dial, steps, stride=1) for dial in ORDERED[:3] for steps in (-1, 1)]
        noise = 2 * self.trial_log.noise
        yield from self.measure(
            dials
            for dials in there
            if all((self.trial_log.ratio(base, dial, setting(dials, dial)) or 1.0) > 1 - noise for dial in ORDERED[:3])
        )

    def settle(self, load: TrialSettings) -> Asking:
        """Repeat settings within noise of the best that need no other load, so that chance does not decide."""
        self.reason = "repeats what lies within noise of the best"
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
        """The best settings whose distance to the first could be noise."""
        trial_log = self.trial_log
        ranked = sorted(trial_log.measured(), key=trial_log.rank, reverse=True)[:CONTENDERS]
        if not ranked:
            return []
        (in_time, top), often = trial_log.rank(ranked[0]), trial_log.count(ranked[0])
        return [
            dials
            for dials in ranked
            if trial_log.rank(dials)
            >= (in_time, top * (1 - SURE * trial_log.noise * sqrt(1 / often + 1 / trial_log.count(dials))))
            and same_load(dials, load)
        ]

    def _could_win(self, base: TrialSettings, there: TrialSettings, dials: Iterable[str]) -> bool:
        """Whether changing these settings could win, judged by their effect elsewhere with a tolerance."""
        product = 1.0
        for dial in dials:
            product *= self.trial_log.ratio(base, dial, setting(there, dial)) or 1.0
        return product * (1 + INTERACT) > 1 + self.trial_log.noise

    def _guess(self, points: dict[int, TrialSettings]) -> Callable[[int], float | None] | None:
        """Upper bounds from the forecast, fitted to all measurements."""
        if self.says is None:
            return None
        says = self.says
        pairs = []
        for dials in self.trial_log.measured():
            said = says(dials)
            worth = self.trial_log.worth(dials)
            if said and worth:
                pairs.append((said, worth))
        fit = Fit(pairs)
        return lambda value: fit.at_most(says(points[value]))


def same_load(dials: TrialSettings, other: TrialSettings) -> bool:
    """Whether both settings can use the same loaded weights."""
    return all(setting(dials, dial) == setting(other, dial) for dial in RELOAD)


def stepped(space: Space, dials: TrialSettings, dial: str, steps: int, stride: int | None = None) -> TrialSettings:
    """The settings some strides further along one setting; unchanged at the end of its values."""
    values = space.values(dial)
    if setting(dials, dial) not in values:
        return dials
    at = values.index(setting(dials, dial)) + steps * (stride or max(1, len(values) // STRIDES))
    return space.turned(dials, dial, values[at]) if 0 <= at < len(values) else dials


def words(dial: str) -> str:
    """Display name of a setting."""
    return dial.replace("_", " ")
