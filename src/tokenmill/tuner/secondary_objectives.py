"""What an aim asks for beyond the most throughput: an earlier first token, fewer cores, more context."""

from collections.abc import Generator, Mapping
from math import log

from tokenmill.tuner.moves import Asking, Leading, Moves, same_load, stepped
from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.space import setting

FEW = 3  # numbers of sequences that are tried with one context and cache type
LATE = 3  # numbers of sequences that only came too late, of which smaller micro-batches are tried


def sooner(walk: Moves, base: TrialSettings) -> Leading:
    """Dials that would win were they in time: smaller micro-batches let an interactive request through sooner."""
    book = walk.book
    yard = walk.book.yard
    bar = book.rank(base)[1] * (1 + book.noise) if book.rank(base)[0] else 0.0
    late: dict[int, TrialSettings] = {}  # the least late for each number of sequences
    for dials in sorted(book.measured(), key=book.rank):
        figures = book.figures(dials)
        tok_s = None if figures is None else yard.tok_s(figures)
        if tok_s is not None and tok_s > bar and not book.rank(dials)[0] and same_load(dials, base):
            late[dials.sequences] = dials
    walk.reason = "tries smaller micro-batches where only the first token came too late"
    best = base
    for dials in sorted(late.values(), key=book.rank, reverse=True)[:LATE]:
        for size in sorted((size for size in walk.space.ubatch if size < dials.ubatch), reverse=True):
            there = walk.space.turned(dials, "ubatch", size)
            yield from walk.measure([there])
            best = walk.better(best, there)
            if book.rank(there)[0]:
                break
    return (yield from walk.climb(best, anew=False)) if best != base else base


def fewer_cores(walk: Moves, aim: Aim, top: TrialSettings) -> Asking:
    """Down the threads from the best, as far as the aim's share of it reaches; then once beside that."""
    while True:
        fewest = yield from _fewest(walk, aim, top)
        less = stepped(walk.space, fewest, "threads", -1, stride=1)
        if less == fewest or "sequences" not in walk.space.free:
            return
        # fewer threads may want other numbers of sequences
        there = [stepped(walk.space, less, "sequences", steps) for steps in (-1, 1)]
        yield from walk.measure(there)
        best = walk.better(less, *there)
        if (walk.book.worth(best) or 0.0) < _bar(walk, aim):
            return
        top = best


def _fewest(walk: Moves, aim: Aim, top: TrialSettings) -> Leading:
    book = walk.book
    space = walk.space
    walk.reason = "takes threads away while enough speed is left"
    points = {value: space.turned(top, "threads", value) for value in space.threads}
    while True:
        bar = _bar(walk, aim)
        seen = {value: worth for value, there in points.items() if (worth := book.worth(there)) is not None}
        fewest = min((value for value, worth in seen.items() if worth >= bar), default=setting(top, "threads"))
        tries = [v for v in points if v < fewest and v not in seen and not book.shut(points[v])]
        hopeful = [v for v in tries if between(seen, v) * (1 + book.noise) >= bar]
        if not hopeful:
            return points[fewest]
        likely = [v for v in hopeful if between(seen, v) >= bar] or hopeful[-1:]
        yield from walk.measure([points[likely[0]]])


def more_context(walk: Moves, aim: Aim, top: TrialSettings) -> Asking:
    """The longest context that keeps the aim's share: by halves, as longer ones are never faster."""
    lengths = walk.space.context
    walk.reason = "lengthens the context while enough speed is left"
    low = lengths.index(top.context) + 1
    high = len(lengths)
    while low < high:
        at = (low + high) // 2
        enough = yield from _reaches(walk, aim, top, lengths[at])
        low, high = (at + 1, high) if enough else (low, at)


def _reaches(walk: Moves, aim: Aim, top: TrialSettings, context: int) -> Generator[list[TrialSettings], None, bool]:
    """Whether some sequences and cache types at this context keep the aim's share of the best.

    By what sequences did at the shorter context, the fewest that should do come first: they take the least memory.
    """
    space = walk.space
    book = walk.book
    own = setting(top, "cache_types")
    most = book.worth(top) or 0.0
    seen = {count: most * did for count in space.sequences if (did := book.ratio(top, "sequences", count)) is not None}
    expected = {count: seen.get(count, between(seen, count)) for count in space.sequences}
    likely = [count for count, worth in expected.items() if worth * (1 + book.noise) >= _bar(walk, aim)]
    for types in sorted(space.cache_types, key=lambda types: types != own):
        there = space.turned(space.turned(top, "context", context), "cache_types", types)
        points = [space.turned(there, "sequences", count) for count in likely]
        for point in [point for point in points if not book.shut(point) or book.worth(point)][:FEW]:
            yield from walk.measure([point])
            if (book.worth(point) or 0.0) >= _bar(walk, aim):
                return True
            if book.hopeless(point):
                break
    return False


def _bar(walk: Moves, aim: Aim) -> float:
    best = walk.book.top()
    return 0.0 if best is None else (walk.book.worth(best) or 0.0) * (1 - aim.within)


def between(seen: Mapping[int, float], value: int) -> float:
    """Worth at a value by what was measured around it, on logarithmic axes; below all of it, as much as the lowest."""
    low = max((known for known in seen if known < value), default=None)
    high = min((known for known in seen if known > value), default=None)
    if low is None:
        return float("inf") if high is None else seen[high]
    if high is None:
        return seen[low] * value / low
    share = log(value / low) / log(high / low)
    found: float = seen[low] ** (1 - share) * seen[high] ** share
    return found
