"""Costs of an operating point: alternatives that are better in other figures, the Pareto front, and the knee."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tokenmill.tuner.point import Trial, TrialSettings
from tokenmill.tuner.search.noise import Standing
from tokenmill.tuner.search.objectives import Yardstick, cores

HALF = 0.5  # share of the throughput: larger losses are not an alternative
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
FIRST = "first token after {:.2g} s instead of {:.2g}"
ENERGY = "{:.2g} J per token instead of {:.2g}"
_SETTINGS = {
    "threads": "{} threads",
    "sequences": "{} sequences",
    "ubatch": "ubatch {}",
    "context": "context {}",
    "cache_type_k": "{} cache",
    "flash_attention": "flash attention {}",
    "mmap": "mmap {}",
    "repack": "repack {}",
    "offload_min_batch": "offload from {} rows",
    "placement": "placement {}",
}


def given_up(
    yard: Yardstick, chosen: Standing, front: Sequence[Standing], found: Sequence[Standing], noise: float
) -> tuple[str, ...]:
    """Sentences on unmet requirements, lost throughput, and advantages of alternatives on the front."""
    rates = {each.dials: rate for each in found if (rate := yard.tok_s(each.figures)) is not None}
    sentences = [*_unmet(yard, chosen)]
    own = rates.get(chosen.dials)
    if own is None:
        return tuple(sentences)
    fastest = max((each for each in found if each.dials in rates), key=lambda each: rates[each.dials])
    most = rates[fastest.dials]
    gains = "".join(f", {gain}" for gain in _gains(chosen, fastest, noise))
    if most > own and (gains or own < most * (1 - noise)):
        sentences.append(f"{instead(chosen.dials, fastest.dials)}: {_percent(1 - own / most)} less{gains}")
    mentioned = {chosen.dials, fastest.dials}
    others = [each for each in front if each.dials not in mentioned and rates.get(each.dials, 0.0) >= HALF * own]
    for other in _leaders(yard, chosen, others):
        gains = ", ".join(_gains(other, chosen, noise))
        there = rates[other.dials]
        price = f", for {_percent(1 - there / own)} less throughput" if there < own else ""
        if gains and other.dials not in mentioned:
            mentioned.add(other.dials)
            sentences.append(f"{instead(other.dials, chosen.dials)} would give {gains}{price}")
    return tuple(sentences)


def _unmet(yard: Yardstick, chosen: Standing) -> Iterator[str]:
    aim = yard.aim
    if aim.kind == "latency" and not yard.in_time(chosen.figures):
        yield f"no settings have their first token within {aim.first_token_s:g} s; these are the fastest"
    if aim.kind == "latency" and yard.by == "throughput":
        yield "first tokens were not measured; chosen by throughput"
    if aim.kind == "energy" and yard.by == "throughput":
        yield "energy was not measured; chosen by throughput"


def _leaders(yard: Yardstick, chosen: Standing, others: Sequence[Standing]) -> Iterator[Standing]:
    """The best of the others in each figure except throughput; the faster one if equal."""

    def rate(each: Standing) -> float:
        return yard.tok_s(each.figures) or 0.0

    for name in ("first_token_s", "joules_per_token"):
        timed = [each for each in others if getattr(each.figures, name) is not None]
        if timed and getattr(chosen.figures, name) is not None:
            yield min(timed, key=lambda each: (getattr(each.figures, name), -rate(each)))
    if others:
        yield min(others, key=lambda each: (cores(each.dials), -rate(each)))
    smaller_caches = [each for each in others if each.dials.context > chosen.dials.context]
    if smaller_caches:
        yield max(smaller_caches, key=lambda each: (each.dials.context, rate(each)))


def _gains(one: Standing, other: Standing, noise: float) -> Iterator[str]:
    """Advantages of one over the other, except throughput."""
    free = cores(other.dials) - cores(one.dials)
    if free > 0:
        number = NUMBERS[free] if free < len(NUMBERS) else str(free)
        yield f"{number} core{'' if free == 1 else 's'} free"
    if one.dials.context > other.dials.context:
        yield f"context {one.dials.context} instead of {other.dials.context}"
    for name, words in (("first_token_s", FIRST), ("joules_per_token", ENERGY)):
        mine = getattr(one.figures, name)
        theirs = getattr(other.figures, name)
        if mine is not None and theirs is not None and mine < theirs * (1 - noise):
            yield words.format(mine, theirs)


def instead(settings: TrialSettings, other: TrialSettings) -> str:
    """The differing settings: `13 threads and 8 sequences instead of 16 and 12`."""
    mine = []
    theirs = []
    for name, words in _SETTINGS.items():
        one = getattr(settings, name)
        two = getattr(other, name)
        if one != two:
            mine.append(words.format(_value(one)))
            theirs.append(_value(two))
    if not mine:
        return f"{settings.threads_batch} threads for prefill instead of {other.threads_batch}"
    return f"{_joined(mine)} instead of {_joined(theirs)}"


def _value(value: object) -> str:
    if value is None:
        return "the engine's own"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _percent(share: float) -> str:
    return "less than 1 %" if share < 0.01 else f"{share * 100:.0f} %"


@dataclass(frozen=True, slots=True)
class Score:
    """Scores, higher is better; None: not measured, not compared."""

    measured: tuple[float | None, ...]  # throughput, first token, energy: subject to noise
    exact: tuple[float, ...]  # cores, context


def score(standing: Standing, yard: Yardstick) -> Score:
    """Score settings in each figure."""
    figures = standing.figures
    settings = standing.dials
    less = (figures.first_token_s, figures.joules_per_token)
    return Score(
        (yard.tok_s(figures), *(1 / value if value else None for value in less)),
        (-float(cores(settings)), float(settings.context)),
    )


def front(found: Sequence[Standing], yard: Yardstick, noise: float, chosen: Standing) -> tuple[Standing, ...]:
    """The Pareto front: the chosen settings first, the others by throughput.

    Differences within noise do not count as better.
    """
    scores = {each.dials: score(each, yard) for each in found}
    ranked = sorted(found, key=lambda each: -(yard.tok_s(each.figures) or 0.0))
    kept = [chosen]
    for each in ranked:
        others = [other for other in found if other.dials != each.dials]
        if each.dials == chosen.dials or any(beats(scores[o.dials], scores[each.dials], 0.0) for o in others):
            continue
        if not any(beats(scores[held.dials], scores[each.dials], noise) for held in kept):
            kept.append(each)
    return tuple(kept)


def beats(one: Score, other: Score, noise: float) -> bool:
    """Whether one is nowhere worse than another, except by noise, and somewhere better.

    Equal scores do not beat each other; without noise this is Pareto dominance.
    """
    pairs = [(a, b) for a, b in zip(one.measured, other.measured, strict=True) if a is not None and b is not None]
    if any(a < b * (1 - noise) for a, b in pairs) or any(a < b for a, b in zip(one.exact, other.exact, strict=True)):
        return False
    within = noise > 0 and one.exact == other.exact  # equal except for noise
    return within or one.exact != other.exact or any(a > b for a, b in pairs)


FALL = 0.05  # minimum loss of speed that counts as a fall
LITTLE = 0.10  # maximum gain that counts as little
OFFLOAD_ROWS = 32  # llama.cpp's own GGML_OP_OFFLOAD_MIN_BATCH
WHY_CLIFF = "possibly because llama.cpp computes {rows} rows and more on the GPU and copies the experts there each time"


@dataclass(frozen=True, slots=True)
class Curve:
    """Throughput over the values of one setting, with the others fixed."""

    setting: str  # sequences or threads
    tok_s: Mapping[int, float]  # ascending
    offload_min_batch: int | None


def knee(
    yard: Yardstick,
    found: Sequence[Standing],
    trials: Sequence[Trial],
    chosen: Standing,
    noise: float,
    *,
    host_experts: bool,
) -> str:
    """A sentence on the steepest fall; else on failures; else on the value beyond which gains are small, if any."""
    curves = [
        curve for setting in ("sequences", "threads") if (curve := longest(yard, found, chosen, setting)) is not None
    ]
    falls = [(fall, curve) for curve in curves if (fall := steepest(curve, max(FALL, 2 * noise))) is not None]
    if falls:
        (low, high), curve = min(falls, key=lambda each: each[1].tok_s[each[0][1]] / each[1].tok_s[each[0][0]])
        words = f"beyond {low} {curve.setting} tok/s falls from {_rate(curve.tok_s[low])} to {_rate(curve.tok_s[high])}"
        rows = OFFLOAD_ROWS if curve.offload_min_batch is None else curve.offload_min_batch
        if host_experts and curve.setting == "sequences" and low < rows <= high:
            return f"{words} at {high}: {WHY_CLIFF.format(rows=rows)}"
        return f"{words} at {high}"
    failed = _failed(trials, chosen.dials)
    if failed is not None:
        return failed
    for curve in curves:
        if (sentence := _bend(curve)) is not None:
            return sentence
    for curve in curves:
        last = max(curve.tok_s)
        return f"tok/s still rises at {last} {curve.setting}, the maximum that was tried: {_rate(curve.tok_s[last])}"
    return "too few values of one setting were measured to find the knee of a curve"


def longest(yard: Yardstick, found: Sequence[Standing], chosen: Standing, setting: str) -> Curve | None:
    """The curve along a setting with the most points, preferably through the chosen settings; None: under three."""
    groups: dict[TrialSettings, dict[int, float]] = {}
    for each in found:
        rate = yard.tok_s(each.figures)
        if rate is not None:
            groups.setdefault(_others(each.dials, setting), {})[getattr(each.dials, setting)] = rate
    own = _others(chosen.dials, setting)
    key = max(groups, key=lambda others: (len(groups[others]), others == own), default=None)
    if key is None or len(groups[key]) < 3:
        return None
    return Curve(setting, dict(sorted(groups[key].items())), key.offload_min_batch)


def _others(settings: TrialSettings, setting: str) -> TrialSettings:
    """The settings without one of them and those tied to it."""
    if setting == "threads":
        return replace(
            settings,
            threads=0,
            threads_batch=0 if settings.threads_batch == settings.threads else settings.threads_batch,
        )
    return replace(settings, sequences=0)


def steepest(curve: Curve, least: float) -> tuple[int, int] | None:
    """The neighbouring values with the largest loss; None if no loss exceeds `least`."""
    pairs = [(low, high) for low, high in pairwise(curve.tok_s) if curve.tok_s[high] < curve.tok_s[low] * (1 - least)]
    return min(pairs, key=lambda pair: curve.tok_s[pair[1]] / curve.tok_s[pair[0]], default=None)


def _bend(curve: Curve) -> str | None:
    """The first value beyond which gains are small."""
    best = max(curve.tok_s.values())
    at = next(value for value, rate in curve.tok_s.items() if rate * (1 + LITTLE) >= best)
    last = max(curve.tok_s)
    if at == last:
        return None
    if at == min(curve.tok_s):
        ends = f"{_rate(curve.tok_s[at])} at {at}, {_rate(curve.tok_s[last])} at {last}"
        return f"tok/s hardly depends on {curve.setting}: {ends}"
    return f"beyond {at} {curve.setting} gains are small: {_rate(curve.tok_s[at])} tok/s at {at}, {_rate(best)} at best"


def _failed(trials: Sequence[Trial], chosen: TrialSettings) -> str | None:
    """The fewest sequences that ran out of memory with otherwise equal settings."""
    ran_out = [
        trial.dials.sequences
        for trial in trials
        if trial.outcome == "out of memory" and _others(trial.dials, "sequences") == _others(chosen, "sequences")
    ]
    if not ran_out:
        return None
    return f"{min(ran_out)} sequences run out of memory; {chosen.sequences} were chosen"


def _rate(tok_s: float) -> str:
    return f"{tok_s:.0f}" if tok_s >= 20 else f"{tok_s:.3g}"
