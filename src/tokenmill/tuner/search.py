"""Which dials to measure next, until nothing untried is expected to win by more than noise. No clock, file or engine.

    the start, the forecast's best -> climb -> repeat what is near the best -> what the aim wishes beyond
    then, for each other way to load the weights: the same from the best so far, as far as it can still win

All that one load can tell is asked before the next: no load is ever needed twice. The course is a generator that does
not ask for what it was told already, so an interrupted search that is told its old trials goes on where it was.
"""

from collections.abc import Callable, Generator, Iterable

from tokenmill.tuner import secondary_objectives
from tokenmill.tuner.moves import CONTENDERS, Asking, Leading, Moves, TrialsSpent, same_load, words
from tokenmill.tuner.point import Aim, Trial, TrialSettings
from tokenmill.tuner.space import KINDS, ORDERED, Space, setting
from tokenmill.tuner.trial_log import TrialLog

LEAST_TRIALS = 16  # even in a small space
SHARE = 5  # of a large one, one trial in so many combinations
KEPT_BACK = 5  # trials for repeats, however many were used before


class Search:
    """Asks for trials and is told of them. Only `ask` and `tell` change it."""

    def __init__(
        self,
        space: Space,
        aim: Aim,
        start: TrialSettings,
        *,
        forecast: Callable[[TrialSettings], float | None] | None = None,
        noise: float = 0.03,
        most_trials: int | None = None,
    ) -> None:
        self.space = space
        self.aim = aim
        self._start = space.nearest(start)
        if aim.kind == "context":  # the best to be near is where memory is left for most sequences
            self._start = space.nearest(space.turned(self._start, "context", space.context[0]))
        self._book = TrialLog(space, aim, noise)
        self._most = max(LEAST_TRIALS, space.all() // SHARE) if most_trials is None else most_trials
        self._limited = most_trials is not None
        self._beside = 0
        # a forecast of throughput says nothing of joules and first tokens
        says = forecast if aim.kind in ("throughput", "cores", "context") else None
        self._walk = Moves(space, self._book, says, self._may_explore)
        self._variants = self._worth_a_load()
        self._wanted: list[TrialSettings] = []  # by the course, and not asked for yet
        self._asked: list[TrialSettings] = []  # and not told yet
        self._expected = self._expect()
        self._course = self._run()
        self._done = False

    def ask(self) -> TrialSettings | None:
        """Dials to measure; None: done. Asked again before it was told, it gives the oldest that is still open."""
        while not self._done:
            if self._wanted:
                dials = self._wanted.pop(0)
                self._asked.append(dials)
                return dials
            if self._asked:
                return self._asked[0]
            left = self._most - len(self._book.trials)
            if left <= 0:
                self._end(self._spent_words())
                break
            try:
                self._wanted = next(self._course)[:left]
            except StopIteration:
                self._done = True
        return None

    def tell(self, trial: Trial) -> None:
        """What came out, in any order; trials that were never asked for count like the others."""
        self._book.add(trial)
        for waiting in (self._asked, self._wanted):
            if trial.dials in waiting:
                waiting.remove(trial.dials)
                break

    def beside(self, count: int) -> None:
        """So many of the trials that it is told were made for another aim: they leave it the number it has."""
        self._most += count
        self._beside += count

    def best(self) -> Trial | None:
        """The choice so far, with the medians of its figures; None where nothing was measured."""
        found = self._book.best()
        return None if found is None else found.as_trial()

    @property
    def reason(self) -> str:
        """What it does now, or why it stopped."""
        return self._walk.reason

    @property
    def noise(self) -> float:
        """Relative spread of repeats: what was given, or more where the trials show more."""
        return self._book.noise

    def remaining(self) -> int:
        """About how many trials are still to come; 0: none."""
        if self._done:
            return 0
        tried = len(self._book.trials)
        return max(1, len(self._wanted) + len(self._asked), min(self._most, self._expected) - tried)

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        """Variants that need the weights loaded anew and are still to be tried."""
        tried = {(dial, setting(trial.dials, dial)) for trial in self._book.trials for dial in self.space.reload}
        return tuple(
            self.space.turned(self._start, dial, value) for dial, value in self._variants if (dial, value) not in tried
        )

    # the course

    def _run(self) -> Asking:
        base = yield from self._first()
        if base is None:
            return
        spent = False
        try:
            base = yield from self._forecast_best(base)
            base = yield from self._whole(base)
            for dial, value in self._variants:
                base = yield from self._loaded(base, dial, value)
        except TrialsSpent:
            spent = True
            yield from self._walk.settle(self._last_load())
        if spent:
            self._end(self._spent_words())
        else:
            self._end(f"nothing untried is expected to win by more than {self._book.noise:.0%}, which is noise here")

    def _first(self) -> Generator[list[TrialSettings], None, TrialSettings | None]:
        """Something that runs: the start, or less of it."""
        last = None
        for dials in self._lesser():
            yield from self._walk.measure([dials])
            if self._book.worth(dials) is not None:
                return dials
            last = self._book.trials[-1] if self._book.trials else None
            if last is not None and last.disturbed is not None:
                self._end(f"every trial was disturbed: {last.disturbed}")
                return None
            self._walk.reason = "looks for settings that run at all"
        why = "memory holds none of it" if last is None else last.detail or last.outcome
        self._end(f"nothing could be measured, not even less than the plan: {why}")
        return None

    def _lesser(self) -> Iterable[TrialSettings]:
        """The start, then with less and less that takes memory, then with the kinds turned."""
        space = self.space
        few = self._start
        yield self._start
        for dial in ("sequences", "ubatch", "context"):
            values = [value for value in space.values(dial) if value < setting(few, dial)]
            for value in dict.fromkeys(values[at] for at in (len(values) // 2, 0) if values):
                few = space.turned(few, dial, value)
                yield few
        for base in (few, self._start):
            for dial in KINDS:
                yield from (space.turned(base, dial, value) for value in space.values(dial))

    def _forecast_best(self, base: TrialSettings) -> Leading:
        """The forecast's own best, reached dial by dial; it becomes the base where it is better."""
        says = self._walk.says
        space = self.space
        if says is None:
            return base
        there = base
        said = says(base)
        for dial in (*ORDERED, *ORDERED):
            for value in space.values(dial) if dial != "context" else ():
                turned = space.turned(there, dial, value)
                rate = says(turned) if space.holds(turned) else None
                if said is not None and rate is not None and rate > said * (1 + self._book.noise):
                    there = turned
                    said = rate
        self._walk.reason = "tries what the forecast holds best"
        yield from self._walk.measure([there])
        return self._walk.better(base, there)

    def _whole(self, base: TrialSettings) -> Leading:
        """All that one load can tell."""
        walk = self._walk
        aim = self.aim
        base = yield from walk.climb(base, skipped="context" if aim.kind == "context" else None)
        if self._book.yard.by == "in time":
            base = yield from secondary_objectives.sooner(walk, base)
        yield from walk.settle(base)
        yield from walk.beside(self._top(base))
        yield from walk.settle(base)
        if aim.kind == "cores":
            yield from secondary_objectives.fewer_cores(walk, aim, self._top(base))
        if aim.kind == "context":
            yield from secondary_objectives.more_context(walk, aim, self._top(base))
        if aim.kind in ("cores", "context"):
            yield from walk.settle(base)
        return self._top(base)

    def _loaded(self, base: TrialSettings, dial: str, value: object) -> Leading:
        """The same on weights that were loaded another way, where that is better."""
        walk = self._walk
        there = self.space.turned(base, dial, value)
        walk.reason = f"loads anew with {words(dial)} {value}"
        yield from walk.measure([there])
        if self._book.worth(there) is None:
            return base
        for along in ("sequences", "threads"):
            if along in self.space.free:
                there = yield from walk.along(there, along)
        yield from walk.settle(there)
        there = self._top(there)
        if walk.better(base, there) == base:
            return base
        return (yield from self._whole(there))

    def _top(self, base: TrialSettings) -> TrialSettings:
        """The best that the same load serves."""
        return max((d for d in self._book.measured() if same_load(d, base)), key=self._book.rank, default=base)

    def _last_load(self) -> TrialSettings:
        return self._book.trials[-1].dials

    # what it reckons with

    def _may_explore(self) -> bool:
        own = self._most - self._beside
        return len(self._book.trials) - self._beside < max(1, own - min(KEPT_BACK, own // 4))

    def _worth_a_load(self) -> list[tuple[str, object]]:
        """Reload dials at other values than the start's, where the forecast does not speak against them."""
        found = []
        own = self._forecast_over_sequences(self._start)
        for dial in self.space.reload:
            for value in self.space.values(dial):
                if value == setting(self._start, dial):
                    continue
                other = self._forecast_over_sequences(self.space.turned(self._start, dial, value))
                if own is None or other is None or other > own * (1 + self._book.noise):
                    found.append((dial, value))
        return found

    def _forecast_over_sequences(self, dials: TrialSettings) -> float | None:
        says = self._walk.says
        if says is None:
            return None
        turned = (self.space.turned(dials, "sequences", count) for count in self.space.sequences)
        said = [says(each) for each in turned if self.space.holds(each)]
        return max((rate for rate in said if rate is not None), default=None)

    def _expect(self) -> int:
        """About how many trials it will take in all, by what searches took on recorded surfaces."""
        lines = sum(
            min(6, len(self.space.values(dial))) if dial in ORDERED else len(self.space.values(dial)) - 1
            for dial in self.space.free
        )
        return 2 + lines + 2 * CONTENDERS + 7 * len(self._variants)

    def _end(self, why: str) -> None:
        self._done = True
        self._walk.reason = why

    def _spent_words(self) -> str:
        worth = "were allowed" if self._limited else f"a space of {self.space.all()} combinations is worth"
        return f"{len(self._book.trials) - self._beside} trials are as many as {worth}"
