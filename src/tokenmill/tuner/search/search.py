"""Decides which settings to measure next, until no untried ones are expected to win by more than noise. Pure.

    the start, the forecast's best -> climb -> repeat what is near the best -> secondary objectives of the aim
    then, for each other way to load the weights: the same from the best so far, as far as it can still win

Everything that one load can measure is requested before the next load. The course is a generator that skips what the
log already has, so an interrupted search resumes when it gets its old trials.
"""

from collections.abc import Callable, Generator, Iterable

from tokenmill.tuner.point import Aim, Trial, TrialSettings
from tokenmill.tuner.search import secondary_objectives
from tokenmill.tuner.search.moves import CONTENDERS, Asking, Leading, Moves, TrialsSpent, same_load, words
from tokenmill.tuner.search.space import KINDS, ORDERED, Space, setting
from tokenmill.tuner.search.trial_log import TrialLog

LEAST_TRIALS = 16  # minimum budget
SHARE = 5  # in a large space: one trial per this number of combinations
KEPT_BACK = 5  # trials reserved for repeats


class Search:
    """Requests trials (`ask`) and receives their results (`tell`); nothing else changes it."""

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
        if aim.kind == "context":  # the neighbourhood to explore is where memory holds most sequences
            self._start = space.nearest(space.turned(self._start, "context", space.context[0]))
        self._log = TrialLog(space, aim, noise)
        self._most = max(LEAST_TRIALS, space.all() // SHARE) if most_trials is None else most_trials
        self._limited = most_trials is not None
        self._beside = 0
        # a forecast of throughput does not predict joules and first tokens
        says = forecast if aim.kind in ("throughput", "cores", "context") else None
        self._walk = Moves(space, self._log, says, self._may_explore)
        self._variants = self._worth_a_load()
        self._wanted: list[TrialSettings] = []  # wanted by the course, not yet returned by `ask`
        self._asked: list[TrialSettings] = []  # returned by `ask`, result pending
        self._expected = self._expect()
        self._course = self._run()
        self._done = False

    def ask(self) -> TrialSettings | None:
        """The next settings to measure; None: done. Repeats the oldest pending ones until their result arrives."""
        while not self._done:
            if self._wanted:
                dials = self._wanted.pop(0)
                self._asked.append(dials)
                return dials
            if self._asked:
                return self._asked[0]
            left = self._most - len(self._log.trials)
            if left <= 0:
                self._end(self._spent_words())
                break
            try:
                self._wanted = next(self._course)[:left]
            except StopIteration:
                self._done = True
        return None

    def tell(self, trial: Trial) -> None:
        """Record a result, in any order; unrequested trials count as well."""
        self._log.add(trial)
        for waiting in (self._asked, self._wanted):
            if trial.dials in waiting:
                waiting.remove(trial.dials)
                break

    def beside(self, count: int) -> None:
        """Exclude `count` recorded trials, made for another aim, from the budget."""
        self._most += count
        self._beside += count

    def best(self) -> Trial | None:
        """The best settings so far with median figures; None without measurements."""
        found = self._log.best()
        return None if found is None else found.as_trial()

    @property
    def reason(self) -> str:
        """The current step, or why the search ended."""
        return self._walk.reason

    @property
    def noise(self) -> float:
        """Relative spread of repeats: the given one, or more if the trials show more."""
        return self._log.noise

    def remaining(self) -> int:
        """Estimated number of remaining trials; 0: none."""
        if self._done:
            return 0
        tried = len(self._log.trials)
        return max(1, len(self._wanted) + len(self._asked), min(self._most, self._expected) - tried)

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        """Settings that need a reload and are still to be tried."""
        tried = {(dial, setting(trial.dials, dial)) for trial in self._log.trials for dial in self.space.reload}
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
            self._end(f"nothing untried is expected to win by more than {self._log.noise:.0%}, which is noise here")

    def _first(self) -> Generator[list[TrialSettings], None, TrialSettings | None]:
        """The first settings that run: the start, or reduced ones."""
        last = None
        for dials in self._lesser():
            yield from self._walk.measure([dials])
            if self._log.worth(dials) is not None:
                return dials
            last = self._log.trials[-1] if self._log.trials else None
            if last is not None and last.disturbed is not None:
                self._end(f"every trial was disturbed: {last.disturbed}")
                return None
            self._walk.reason = "looks for settings that run at all"
        why = "memory holds none of it" if last is None else last.detail or last.outcome
        self._end(f"nothing could be measured, not even less than the plan: {why}")
        return None

    def _lesser(self) -> Iterable[TrialSettings]:
        """The start, then settings that need less and less memory, then other load options."""
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
        """Climb to the forecast's optimum one setting at a time; it becomes the base if it is better."""
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
                if said is not None and rate is not None and rate > said * (1 + self._log.noise):
                    there = turned
                    said = rate
        self._walk.reason = "tries what the forecast holds best"
        yield from self._walk.measure([there])
        return self._walk.better(base, there)

    def _whole(self, base: TrialSettings) -> Leading:
        """Everything that can be measured with one load."""
        walk = self._walk
        aim = self.aim
        base = yield from walk.climb(base, skipped="context" if aim.kind == "context" else None)
        if self._log.yard.by == "in time":
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
        """Repeat with weights loaded another way, if that is better."""
        walk = self._walk
        there = self.space.turned(base, dial, value)
        walk.reason = f"loads anew with {words(dial)} {value}"
        yield from walk.measure([there])
        if self._log.worth(there) is None:
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
        """The best settings that the same load serves."""
        return max((d for d in self._log.measured() if same_load(d, base)), key=self._log.rank, default=base)

    def _last_load(self) -> TrialSettings:
        return self._log.trials[-1].dials

    # what it reckons with

    def _may_explore(self) -> bool:
        own = self._most - self._beside
        return len(self._log.trials) - self._beside < max(1, own - min(KEPT_BACK, own // 4))

    def _worth_a_load(self) -> list[tuple[str, object]]:
        """Reload settings with other values than the start's, unless the forecast predicts a loss."""
        found = []
        own = self._forecast_over_sequences(self._start)
        for dial in self.space.reload:
            for value in self.space.values(dial):
                if value == setting(self._start, dial):
                    continue
                other = self._forecast_over_sequences(self.space.turned(self._start, dial, value))
                if own is None or other is None or other > own * (1 + self._log.noise):
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
        """Estimated total number of trials, from searches on recorded surfaces."""
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
        return f"{len(self._log.trials) - self._beside} trials are as many as {worth}"
