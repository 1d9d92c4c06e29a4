"""Decides which settings to measure next, until no untried ones are expected to win by more than noise. Pure.

    start, the forecast's best -> climb -> repeat settings near the best -> secondary objectives of the aim
    then for each setting that needs a reload: the same from the best so far, if it can still win

Everything that one load can measure is requested before the next load. The course is a generator that skips settings
with figures in the log, so an interrupted search resumes when it receives its old trials.
"""

from collections.abc import Callable, Generator, Iterable

from tokenmill.tuner.point import Aim, Trial, TrialSettings
from tokenmill.tuner.search import secondary_objectives
from tokenmill.tuner.search.moves import CONTENDERS, Asking, Leading, Moves, TrialsSpent, same_load, words
from tokenmill.tuner.search.space import KINDS, ORDERED, Space, setting
from tokenmill.tuner.search.trial_log import TrialLog

MIN_TRIALS = 16  # minimum budget
SHARE = 5  # in a large space: one trial per this number of combinations
RESERVED_TRIALS = 5  # for repeats


class Search:
    """Requests trials (`ask`) and receives their results (`tell`)."""

    def __init__(
        self,
        space: Space,
        aim: Aim,
        start: TrialSettings,
        *,
        forecast: Callable[[TrialSettings], float | None] | None = None,
        noise: float = 0.03,
        max_trials: int | None = None,
    ) -> None:
        self.space = space
        self.aim = aim
        self._start = space.nearest(start)
        if aim.kind == "context":  # explore where memory holds the most sequences
            self._start = space.nearest(space.turned(self._start, "context", space.context[0]))
        self._log = TrialLog(space, aim, noise)
        self._max_trials = max(MIN_TRIALS, space.all() // SHARE) if max_trials is None else max_trials
        self._limited = max_trials is not None
        self._excluded = 0
        # the forecast predicts throughput, not joules and first tokens
        forecast = forecast if aim.kind in ("throughput", "cores", "context") else None
        self._moves = Moves(space, self._log, forecast, self._may_explore)
        self._variants = self._worth_a_load()
        self._wanted: list[TrialSettings] = []  # requested by the course, not yet returned by `ask`
        self._asked: list[TrialSettings] = []  # returned by `ask`, result pending
        self._expected = self._expect()
        self._course = self._run()
        self._done = False

    def ask(self) -> TrialSettings | None:
        """The next settings to measure; None: done. Pending settings are returned again until their result arrives."""
        while not self._done:
            if self._wanted:
                settings = self._wanted.pop(0)
                self._asked.append(settings)
                return settings
            if self._asked:
                return self._asked[0]
            left = self._max_trials - len(self._log.trials)
            if left <= 0:
                self._end(self._budget_words())
                break
            try:
                self._wanted = next(self._course)[:left]
            except StopIteration:
                self._done = True
        return None

    def tell(self, trial: Trial) -> None:
        """Record a result, in any order; trials that were not requested are used as well."""
        self._log.add(trial)
        for waiting in (self._asked, self._wanted):
            if trial.dials in waiting:
                waiting.remove(trial.dials)
                break

    def exclude(self, count: int) -> None:
        """Exclude `count` recorded trials from the budget, because they were made for another aim."""
        self._max_trials += count
        self._excluded += count

    def best(self) -> Trial | None:
        """The best settings so far with median figures; None without measurements."""
        found = self._log.best()
        return None if found is None else found.as_trial()

    @property
    def reason(self) -> str:
        """The current step, or why the search ended."""
        return self._moves.reason

    @property
    def noise(self) -> float:
        """Relative spread of repeats: the given one, or more if the trials show more."""
        return self._log.noise

    def remaining(self) -> int:
        """Estimated number of remaining trials."""
        if self._done:
            return 0
        tried = len(self._log.trials)
        return max(1, len(self._wanted) + len(self._asked), min(self._max_trials, self._expected) - tried)

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        """Settings that need a reload and are still to be tried."""
        tried = {(name, setting(trial.dials, name)) for trial in self._log.trials for name in self.space.reload}
        return tuple(
            self.space.turned(self._start, name, value) for name, value in self._variants if (name, value) not in tried
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
            for name, value in self._variants:
                base = yield from self._loaded(base, name, value)
        except TrialsSpent:
            spent = True
            yield from self._moves.settle(self._last_load())
        if spent:
            self._end(self._budget_words())
        else:
            self._end(f"no untried settings are expected to win by more than the noise of {self._log.noise:.0%}")

    def _first(self) -> Generator[list[TrialSettings], None, TrialSettings | None]:
        """The first settings that run: the start, or smaller ones."""
        last = None
        for settings in self._smaller():
            yield from self._moves.measure([settings])
            if self._log.worth(settings) is not None:
                return settings
            last = self._log.trials[-1] if self._log.trials else None
            if last is not None and last.disturbed is not None:
                self._end(f"every trial was disturbed: {last.disturbed}")
                return None
            self._moves.reason = "looking for settings that run"
        why = "no settings fit in memory" if last is None else last.detail or last.outcome
        self._end(f"no settings could be measured, not even smaller ones than the plan's: {why}")
        return None

    def _smaller(self) -> Iterable[TrialSettings]:
        """The start, then settings that need ever less memory, then other kinds of settings."""
        space = self.space
        few = self._start
        yield self._start
        for name in ("sequences", "ubatch", "context"):
            values = [value for value in space.values(name) if value < setting(few, name)]
            for value in dict.fromkeys(values[at] for at in (len(values) // 2, 0) if values):
                few = space.turned(few, name, value)
                yield few
        for base in (few, self._start):
            for name in KINDS:
                yield from (space.turned(base, name, value) for value in space.values(name))

    def _forecast_best(self, base: TrialSettings) -> Leading:
        """Try the forecast's optimum, found one setting at a time; it becomes the base if it is better."""
        forecast = self._moves.forecast
        space = self.space
        if forecast is None:
            return base
        there = base
        predicted = forecast(base)
        for name in (*ORDERED, *ORDERED):
            for value in space.values(name) if name != "context" else ():
                turned = space.turned(there, name, value)
                rate = forecast(turned) if space.holds(turned) else None
                if predicted is not None and rate is not None and rate > predicted * (1 + self._log.noise):
                    there = turned
                    predicted = rate
        self._moves.reason = "trying the forecast's best settings"
        yield from self._moves.measure([there])
        return self._moves.better(base, there)

    def _whole(self, base: TrialSettings) -> Leading:
        """All steps that need no other load."""
        moves = self._moves
        aim = self.aim
        base = yield from moves.climb(base, skipped="context" if aim.kind == "context" else None)
        if self._log.yard.by == "in time":
            base = yield from secondary_objectives.sooner(moves, base)
        yield from moves.settle(base)
        yield from moves.neighbours(self._top(base))
        yield from moves.settle(base)
        if aim.kind == "cores":
            yield from secondary_objectives.fewer_cores(moves, aim, self._top(base))
        if aim.kind == "context":
            yield from secondary_objectives.more_context(moves, aim, self._top(base))
        if aim.kind in ("cores", "context"):
            yield from moves.settle(base)
        return self._top(base)

    def _loaded(self, base: TrialSettings, name: str, value: object) -> Leading:
        """Load with another value of a setting, and repeat all steps if it is better."""
        moves = self._moves
        there = self.space.turned(base, name, value)
        moves.reason = f"reloading with {words(name)} {value}"
        yield from moves.measure([there])
        if self._log.worth(there) is None:
            return base
        for along in ("sequences", "threads"):
            if along in self.space.free:
                there = yield from moves.along(there, along)
        yield from moves.settle(there)
        there = self._top(there)
        if moves.better(base, there) == base:
            return base
        return (yield from self._whole(there))

    def _top(self, base: TrialSettings) -> TrialSettings:
        """The best settings with the same load as `base`."""
        return max((d for d in self._log.measured() if same_load(d, base)), key=self._log.rank, default=base)

    def _last_load(self) -> TrialSettings:
        return self._log.trials[-1].dials

    # budget and forecasts

    def _may_explore(self) -> bool:
        own = self._max_trials - self._excluded
        return len(self._log.trials) - self._excluded < max(1, own - min(RESERVED_TRIALS, own // 4))

    def _worth_a_load(self) -> list[tuple[str, object]]:
        """Settings that need a reload, with values other than the start's for which the forecast predicts no loss."""
        found = []
        own = self._forecast_over_sequences(self._start)
        for name in self.space.reload:
            for value in self.space.values(name):
                if value == setting(self._start, name):
                    continue
                other = self._forecast_over_sequences(self.space.turned(self._start, name, value))
                if own is None or other is None or other > own * (1 + self._log.noise):
                    found.append((name, value))
        return found

    def _forecast_over_sequences(self, settings: TrialSettings) -> float | None:
        forecast = self._moves.forecast
        if forecast is None:
            return None
        turned = (self.space.turned(settings, "sequences", count) for count in self.space.sequences)
        predicted = [forecast(each) for each in turned if self.space.holds(each)]
        return max((rate for rate in predicted if rate is not None), default=None)

    def _expect(self) -> int:
        """Estimated total number of trials; the constants come from searches on recorded surfaces."""
        lines = sum(
            min(6, len(self.space.values(name))) if name in ORDERED else len(self.space.values(name)) - 1
            for name in self.space.free
        )
        return 2 + lines + 2 * CONTENDERS + 7 * len(self._variants)

    def _end(self, why: str) -> None:
        self._done = True
        self._moves.reason = why

    def _budget_words(self) -> str:
        limit = "the given limit" if self._limited else f"the limit for {self.space.all()} combinations"
        return f"stopped after {len(self._log.trials) - self._excluded} trials, {limit}"
