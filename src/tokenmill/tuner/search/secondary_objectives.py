"""Search steps for aims other than throughput: earlier first token, fewer cores, longer context."""

from collections.abc import Generator, Mapping
from math import log

from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.search.moves import Asking, Leading, Moves, same_load, stepped
from tokenmill.tuner.search.space import setting

FEW = 3  # numbers of sequences tried per context and cache type
LATE = 3  # numbers of sequences that are retried with smaller micro-batches


def sooner(moves: Moves, base: TrialSettings) -> Leading:
    """Retry fast settings with a late first token with smaller micro-batches, which delay interactive requests less."""
    trial_log = moves.trial_log
    yard = moves.trial_log.yard
    bar = trial_log.rank(base)[1] * (1 + trial_log.noise) if trial_log.rank(base)[0] else 0.0
    late: dict[int, TrialSettings] = {}  # the least late per number of sequences
    for settings in sorted(trial_log.measured(), key=trial_log.rank):
        figures = trial_log.figures(settings)
        tok_s = None if figures is None else yard.tok_s(figures)
        if tok_s is not None and tok_s > bar and not trial_log.rank(settings)[0] and same_load(settings, base):
            late[settings.sequences] = settings
    moves.reason = "trying smaller micro-batches where only the first token was too late"
    best = base
    for settings in sorted(late.values(), key=trial_log.rank, reverse=True)[:LATE]:
        for size in sorted((size for size in moves.space.ubatch if size < settings.ubatch), reverse=True):
            there = moves.space.turned(settings, "ubatch", size)
            yield from moves.measure([there])
            best = moves.better(best, there)
            if trial_log.rank(there)[0]:
                break
    return (yield from moves.climb(best, anew=False)) if best != base else base


def fewer_cores(moves: Moves, aim: Aim, top: TrialSettings) -> Asking:
    """Reduce threads from the best while enough throughput remains, then check the neighbours."""
    while True:
        fewest = yield from _fewest(moves, aim, top)
        less = stepped(moves.space, fewest, "threads", -1, stride=1)
        if less == fewest or "sequences" not in moves.space.free:
            return
        # fewer threads may prefer other numbers of sequences
        there = [stepped(moves.space, less, "sequences", steps) for steps in (-1, 1)]
        yield from moves.measure(there)
        best = moves.better(less, *there)
        if (moves.trial_log.worth(best) or 0.0) < _bar(moves, aim):
            return
        top = best


def _fewest(moves: Moves, aim: Aim, top: TrialSettings) -> Leading:
    trial_log = moves.trial_log
    space = moves.space
    moves.reason = "reducing threads while enough speed remains"
    points = {value: space.turned(top, "threads", value) for value in space.threads}
    while True:
        bar = _bar(moves, aim)
        seen = {value: worth for value, there in points.items() if (worth := trial_log.worth(there)) is not None}
        fewest = min((value for value, worth in seen.items() if worth >= bar), default=setting(top, "threads"))
        tries = [v for v in points if v < fewest and v not in seen and not trial_log.excluded(points[v])]
        hopeful = [v for v in tries if between(seen, v) * (1 + trial_log.noise) >= bar]
        if not hopeful:
            return points[fewest]
        likely = [v for v in hopeful if between(seen, v) >= bar] or hopeful[-1:]
        yield from moves.measure([points[likely[0]]])


def more_context(moves: Moves, aim: Aim, top: TrialSettings) -> Asking:
    """Find the longest context with enough throughput by bisection, because longer ones are never faster."""
    lengths = moves.space.context
    moves.reason = "extending the context while enough speed remains"
    low = lengths.index(top.context) + 1
    high = len(lengths)
    while low < high:
        at = (low + high) // 2
        enough = yield from _reaches(moves, aim, top, lengths[at])
        low, high = (at + 1, high) if enough else (low, at)


def _reaches(moves: Moves, aim: Aim, top: TrialSettings, context: int) -> Generator[list[TrialSettings], None, bool]:
    """Whether any sequences and cache types keep enough throughput at this context.

    Starts with the fewest sequences that suffice at shorter contexts, because they need the least memory.
    """
    space = moves.space
    trial_log = moves.trial_log
    own = setting(top, "cache_types")
    most = trial_log.worth(top) or 0.0
    seen = {
        count: most * did for count in space.sequences if (did := trial_log.ratio(top, "sequences", count)) is not None
    }
    expected = {count: seen.get(count, between(seen, count)) for count in space.sequences}
    likely = [count for count, worth in expected.items() if worth * (1 + trial_log.noise) >= _bar(moves, aim)]
    for types in sorted(space.cache_types, key=lambda types: types != own):
        there = space.turned(space.turned(top, "context", context), "cache_types", types)
        points = [space.turned(there, "sequences", count) for count in likely]
        for point in [point for point in points if not trial_log.excluded(point) or trial_log.worth(point)][:FEW]:
            yield from moves.measure([point])
            if (trial_log.worth(point) or 0.0) >= _bar(moves, aim):
                return True
            if trial_log.hopeless(point):
                break
    return False


def _bar(moves: Moves, aim: Aim) -> float:
    best = moves.trial_log.top()
    return 0.0 if best is None else (moves.trial_log.worth(best) or 0.0) * (1 - aim.within)


def between(seen: Mapping[int, float], value: int) -> float:
    """Interpolate worth on logarithmic axes; below all measured values, the lowest one's worth."""
    low = max((known for known in seen if known < value), default=None)
    high = min((known for known in seen if known > value), default=None)
    if low is None:
        return float("inf") if high is None else seen[high]
    if high is None:
        return seen[low] * value / low
    share = log(value / low) / log(high / low)
    found: float = seen[low] ** (1 - share) * seen[high] ** share
    return found
