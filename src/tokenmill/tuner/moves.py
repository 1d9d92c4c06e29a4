"""Steps of a search through a space: along one dial, around a point, at corners, and once more where noise decides.

Each is a generator that yields dials it needs figures of and returns where it got to. What the book knows already is
not asked for. The points of a step differ in nothing that needs a load, but for what the caller put there.
"""

from collections.abc import Callable, Generator, Iterable
from math import sqrt

from tokenmill.tuner.curves import WorthCurve, bound, probe
from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.space import ORDERED, RELOAD, Space, cache_bytes, setting
from tokenmill.tuner.trial_log import Fit, TrialLog

Asking = Generator[list[TrialSettings], None, None]
Leading = Generator[list[TrialSettings], None, TrialSettings]
Says = Callable[[TrialSettings], float | None]

ROUNDS = 4  # of climbing
INTERACT = 0.15  # how much more or less a dial may do where another one is turned
CONTENDERS = 4  # dials near the best that are measured again
SURE = 1.5  # standard deviations that two dials must lie apart to be told from each other
TIMES = 3  # that a contender is measured, at most
STRIDES = 8  # a long dial is stepped along in so many
GAPS = {"sequences": 4.0, "threads": 2.0, "ubatch": 4.0, "threads_batch": 2.0, "context": 8.0}


class TrialsSpent(Exception):
    """No trials are left for looking around. Never leaves the search."""


class Moves:
    """A book, a space and the steps between. Only `reason` and `exploring` change; figures come through the book."""

    def __init__(self, space: Space, book: TrialLog, says: Says | None, may_explore: Callable[[], bool]) -> None:
        self.space = space
        self.book = book
        self.says = says
        self.may_explore = may_explore
        self.reason = "begins with the plan's own settings"
        self.exploring = True  # whether trials that are kept back for repeats stay untouched

    def measure(self, points: Iterable[TrialSettings], times: int = 1) -> Asking:
        """Have dials measured, disturbed ones again; those that cannot be are left out."""
        held = [dials for dials in dict.fromkeys(points) if self.space.holds(dials)]
        while wanting := [dials for dials in held if self.book.wants(dials, times)]:
            if self.exploring and not self.may_explore():
                raise TrialsSpent
            yield wanting

    def better(self, base: TrialSettings, *others: TrialSettings) -> TrialSettings:
        """The best of these; the base where others win by less than half the noise."""
        in_time, worth = self.book.rank(base)
        best = base
        most = (in_time, worth * (1 + self.book.noise / 2))
        for dials in others:
            if self.book.rank(dials) > most:
                best = dials
                most = self.book.rank(dials)
        return best

    def climb(self, base: TrialSettings, *, skipped: str | None = None, anew: bool = True) -> Leading:
        """One dial after the other, then what lies around the point where that led, until nothing moves.

        Not `anew`: all dials were looked along not far from here.
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
        """The best along one dial."""
        book = self.book
        self.reason = f"looks along {words(dial)}"
        points = {value: self.space.turned(base, dial, value) for value in self.space.values(dial)}
        if dial not in ORDERED:
            yield from self.measure(points.values())
            return self.better(base, *points.values())
        while True:
            seen = {value: worth for value, there in points.items() if (worth := book.worth(there)) is not None}
            shut = frozenset(value for value, there in points.items() if value not in seen and book.shut(there))
            line = WorthCurve(tuple(points), seen, shut, GAPS[dial], from_first=dial == "sequences")
            best = max((book.rank(points[value]) for value in seen), default=(False, 0.0))
            value = probe(line, best[1] * (1 + book.noise / 2), self._guess(points))
            if value is None:
                return self.better(base, *points.values())
            yield from self.measure([points[value]])

    def near(self, base: TrialSettings, dial: str) -> Leading:
        """Whether a dial that was looked along elsewhere is right here too: its neighbours, all if one wins."""
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
        """Threads and sequences together: where each alone gains nothing, both may."""
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
        """Smaller cache types where memory, and nothing else, keeps more sequences from being tried."""
        points = {count: self.space.turned(base, "sequences", count) for count in self.space.sequences}
        seen = {count: worth for count, there in points.items() if (worth := self.book.worth(there)) is not None}
        line = WorthCurve(tuple(points), seen)
        bar = self.book.rank(base)[1] * (1 + self.book.noise)
        kept_out = [c for c in points if c > base.sequences and c not in seen and self.book.shut(points[c])]
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
                if self.book.worth(there) is not None:
                    best = self.better(best, (yield from self.along(there, "sequences")))
        return best

    def beside(self, base: TrialSettings) -> Asking:
        """The very next values of the dials that matter most: small gains add up, and none of them is worth a line."""
        self.reason = "looks right beside the best"
        there = [stepped(self.space, base, dial, steps, stride=1) for dial in ORDERED[:3] for steps in (-1, 1)]
        noise = 2 * self.book.noise
        yield from self.measure(
            dials
            for dials in there
            if all((self.book.ratio(base, dial, setting(dials, dial)) or 1.0) > 1 - noise for dial in ORDERED[:3])
        )

    def settle(self, load: TrialSettings) -> Asking:
        """Measure again what lies within noise of the best and needs no other load, so that luck does not decide."""
        self.reason = "repeats what lies within noise of the best"
        exploring = self.exploring
        self.exploring = False
        for times in range(2, TIMES + 1):
            for _ in range(CONTENDERS):
                choice = self.book.best()
                asked = len(self.book.trials)
                chosen = [choice.dials] if choice is not None and same_load(choice.dials, load) else []
                yield from self.measure([*chosen, *self._contenders(load)], times)
                if asked == len(self.book.trials):
                    break
            if len(self._contenders(load)) < 2:
                break
        self.exploring = exploring

    def _contenders(self, load: TrialSettings) -> list[TrialSettings]:
        """The dials worth most, as far as noise alone could have put them behind the first."""
        book = self.book
        ranked = sorted(book.measured(), key=book.rank, reverse=True)[:CONTENDERS]
        if not ranked:
            return []
        (in_time, top), often = book.rank(ranked[0]), book.count(ranked[0])
        return [
            dials
            for dials in ranked
            if book.rank(dials) >= (in_time, top * (1 - SURE * book.noise * sqrt(1 / often + 1 / book.count(dials))))
            and same_load(dials, load)
        ]

    def _could_win(self, base: TrialSettings, there: TrialSettings, dials: Iterable[str]) -> bool:
        """By what turning each of these dials did elsewhere, with room for their doing more here."""
        product = 1.0
        for dial in dials:
            product *= self.book.ratio(base, dial, setting(there, dial)) or 1.0
        return product * (1 + INTERACT) > 1 + self.book.noise

    def _guess(self, points: dict[int, TrialSettings]) -> Callable[[int], float | None] | None:
        """The forecast, fitted to all that was measured."""
        if self.says is None:
            return None
        says = self.says
        pairs = []
        for dials in self.book.measured():
            said = says(dials)
            worth = self.book.worth(dials)
            if said and worth:
                pairs.append((said, worth))
        fit = Fit(pairs)
        return lambda value: fit.at_most(says(points[value]))


def same_load(dials: TrialSettings, other: TrialSettings) -> bool:
    """Whether the same loaded weights serve both."""
    return all(setting(dials, dial) == setting(other, dial) for dial in RELOAD)


def stepped(space: Space, dials: TrialSettings, dial: str, steps: int, stride: int | None = None) -> TrialSettings:
    """The same, some strides further along a dial; itself where the dial ends or has no values of its own."""
    values = space.values(dial)
    if setting(dials, dial) not in values:
        return dials
    at = values.index(setting(dials, dial)) + steps * (stride or max(1, len(values) // STRIDES))
    return space.turned(dials, dial, values[at]) if 0 <= at < len(values) else dials


def words(dial: str) -> str:
    """A dial's name as it is spoken."""
    return dial.replace("_", " ")
