"""The bend of the curve in one sentence: where more of something stops paying, by what was measured and no more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tokenmill.tuner.aims import Yardstick
from tokenmill.tuner.noise import Standing
from tokenmill.tuner.point import Trial, TrialSettings

FALL = 0.05  # of the speed, at least, to be called one
LITTLE = 0.10  # what more may add and still be little
OFFLOAD_ROWS = 32  # llama.cpp's own GGML_OP_OFFLOAD_MIN_BATCH
WHY_CLIFF = "possibly because llama.cpp computes {rows} rows and more on the GPU and copies the experts there each time"


@dataclass(frozen=True, slots=True)
class Curve:
    """Throughput by the value of one dial, the others still."""

    dial: str  # sequences or threads
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
    """The steepest fall; else what did not run; else where more adds little; else that nothing bends yet."""
    curves = [curve for dial in ("sequences", "threads") if (curve := longest(yard, found, chosen, dial)) is not None]
    falls = [(fall, curve) for curve in curves if (fall := steepest(curve, max(FALL, 2 * noise))) is not None]
    if falls:
        (low, high), curve = min(falls, key=lambda each: each[1].tok_s[each[0][1]] / each[1].tok_s[each[0][0]])
        words = f"beyond {low} {curve.dial} tok/s falls from {_rate(curve.tok_s[low])} to {_rate(curve.tok_s[high])}"
        rows = OFFLOAD_ROWS if curve.offload_min_batch is None else curve.offload_min_batch
        if host_experts and curve.dial == "sequences" and low < rows <= high:
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
        return f"tok/s still rises at the most {curve.dial} that were tried: {_rate(curve.tok_s[last])} at {last}"
    return "no curve: too few values of one dial were measured to see where it bends"


def longest(yard: Yardstick, found: Sequence[Standing], chosen: Standing, dial: str) -> Curve | None:
    """The curve along a dial with most points; of equal ones the one through the chosen dials. None: under three."""
    groups: dict[TrialSettings, dict[int, float]] = {}
    for each in found:
        rate = yard.tok_s(each.figures)
        if rate is not None:
            groups.setdefault(_others(each.dials, dial), {})[getattr(each.dials, dial)] = rate
    own = _others(chosen.dials, dial)
    key = max(groups, key=lambda others: (len(groups[others]), others == own), default=None)
    if key is None or len(groups[key]) < 3:
        return None
    return Curve(dial, dict(sorted(groups[key].items())), key.offload_min_batch)


def _others(dials: TrialSettings, dial: str) -> TrialSettings:
    """The same with one dial, and what is tied to it, taken out."""
    if dial == "threads":
        return replace(
            dials, threads=0, threads_batch=0 if dials.threads_batch == dials.threads else dials.threads_batch
        )
    return replace(dials, sequences=0)


def steepest(curve: Curve, least: float) -> tuple[int, int] | None:
    """The two neighbouring values between which most is lost; None where none loses so much."""
    pairs = [(low, high) for low, high in pairwise(curve.tok_s) if curve.tok_s[high] < curve.tok_s[low] * (1 - least)]
    return min(pairs, key=lambda pair: curve.tok_s[pair[1]] / curve.tok_s[pair[0]], default=None)


def _bend(curve: Curve) -> str | None:
    """The first value beyond which nothing adds more than a little."""
    best = max(curve.tok_s.values())
    at = next(value for value, rate in curve.tok_s.items() if rate * (1 + LITTLE) >= best)
    last = max(curve.tok_s)
    if at == last:
        return None
    if at == min(curve.tok_s):
        ends = f"{_rate(curve.tok_s[at])} at {at}, {_rate(curve.tok_s[last])} at {last}"
        return f"tok/s hardly depends on {curve.dial}: {ends}"
    return f"from {at} {curve.dial} on more add little: {_rate(curve.tok_s[at])} tok/s there, {_rate(best)} at best"


def _failed(trials: Sequence[Trial], chosen: TrialSettings) -> str | None:
    """The fewest sequences that ran out of memory, where nothing else differs from the chosen dials."""
    ran_out = [
        trial.dials.sequences
        for trial in trials
        if trial.outcome == "out of memory" and _others(trial.dials, "sequences") == _others(chosen, "sequences")
    ]
    if not ran_out:
        return None
    return f"{min(ran_out)} sequences run out of memory; {chosen.sequences} are what was chosen below that"


def _rate(tok_s: float) -> str:
    return f"{tok_s:.0f}" if tok_s >= 20 else f"{tok_s:.3g}"
