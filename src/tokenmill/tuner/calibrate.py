"""Computes corrections of the forecast from recorded runs: factors for decode and prefill, and unknown memory rates.

Pure. A model's own runs are compared with the uncorrected forecast for their settings, so a correction never corrects
itself. For other models, only their first recorded predictions are used, which their own runs had not corrected yet.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from tokenmill.engine.load_history import types_of
from tokenmill.planner.placement import fingerprint, kinds
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.calibration import Calibration, Correction
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.planner.speed.rates import QuantFamily, family
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures
from tokenmill.tuner.search.forecasts import settings_at

MAX_FACTOR = 8.0  # larger errors have a cause that no factor corrects
RECENT = 24  # latest measurements that are used
FIRST = 10  # predictions of another model that are assumed to be uncorrected
ENOUGH = 3  # measurements of other models with the same kind of weights
OWN, ALIKE, ANY = 0.05, 0.12, 0.25  # prior spread: this model, same kind of weights, any model
_SIGMA = 1.4826  # standard deviation of a normal distribution per median absolute deviation
_RATES_GB_S = (0.05, 20_000.0)  # bounds of the search for a memory's rate
_HALVINGS = 24
_ENDLESS = 0.95  # share of the speed with unlimited memory from which the rate no longer matters
_SOLVED = 5  # measurements used to solve for a rate; each takes many forecasts
RateKind = Literal["decode", "prefill"]


def calibration(
    speeds: Sequence[SpeedRecord],
    plan: Plan,
    *,
    machine_id: str,
    model_id: str | None,
    engines: Sequence[str],
    families: Mapping[str, QuantFamily] | None = None,
) -> Calibration | None:
    """The calibration of a plan from the records of this machine and these engines; None without usable records.

    `plan` must be uncalibrated. `model_id` is None for a model whose files are missing; `families`: weight
    kinds of measured models. A model's own runs count only with the plan's placement, other models' only with
    weights in the same memories.
    """
    where = fingerprint(plan.profile, plan.placement)
    here = newest_builds(one for one in speeds if one.machine_id == machine_id and one.engine in engines)
    own = [one for one in here if one.model_id == model_id and one.dials.placement == where][-RECENT:]
    rates = _rates(own, plan)
    known = Calibration(rates) if rates else None
    decode, prefill = (_own(kind, own, plan, known) for kind in ("decode", "prefill"))
    others = [one for one in here if one.model_id != model_id and kinds(one.dials.placement) == kinds(where)]
    if not rates:  # predictions of other models depend on the rate that the machine file states
        decode = decode or _of_others("decode", others, plan, families or {})
        prefill = prefill or _of_others("prefill", others, plan, families or {})
    if decode is None and prefill is None:
        return None
    return Calibration(rates, decode, prefill)


def newest_builds(speeds: Iterable[SpeedRecord]) -> list[SpeedRecord]:
    """Records of each engine's newest build, oldest first."""
    ordered = sorted(speeds, key=lambda one: one.when)
    builds = {one.engine: one.build for one in ordered}
    return [one for one in ordered if one.build == builds[one.engine]]


def predicted(plan: Plan, speed: SpeedRecord, known: Calibration | None = None) -> Figures:
    """The forecast at the settings of a record; None if a fact is unknown."""
    settings = speed.dials
    depth = speed.depth
    given = (plan.machine, plan.profile, settings_at(plan, settings), plan.placement)
    write = decode_speed(*given, depth=depth, sequences=settings.sequences, calibration=known)
    # a bench computes only the last part of its prompt, other sources all of it
    last = min(depth, settings.ubatch) if speed.source in ("bench", "soak") else depth
    read = prefill_speed(*given, depth=depth - last, prompt=last or None, calibration=known)
    return Figures(write.tok_s if write is not None else None, read.tok_s if read is not None else None)


def main_family(types: Mapping[str, int]) -> QuantFamily | None:
    """The weight kind with the most bytes; None if no types are known."""
    sizes: dict[QuantFamily, int] = {}
    for name, count in types.items():
        sizes[family(name)] = sizes.get(family(name), 0) + count
    found: list[QuantFamily] = sorted(sizes, key=lambda one: sizes[one])
    return found[-1] if found else None


def correction(ratios: Sequence[float], *, expected: float, of: str, last: str | None = None) -> Correction:
    """One factor with spread from ratios of measured to predicted seconds; needs at least one."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = median(logs)
    seen = _SIGMA * median(abs(one - middle) for one in logs)
    # the prior counts as one measurement, so that a single one does not look exact
    spread = math.sqrt((expected**2 + len(logs) * seen**2) / (len(logs) + 1))
    bound = math.log(MAX_FACTOR)
    return Correction(math.exp(max(-bound, min(bound, middle))), min(spread, bound), len(logs), of, last)


def _own(kind: RateKind, own: Sequence[SpeedRecord], plan: Plan, known: Calibration | None) -> Correction | None:
    found = [(one, ratio) for one in own if (ratio := _ratio(kind, one, predicted(plan, one, known))) is not None]
    if not found:
        return None
    return correction([ratio for _, ratio in found], expected=OWN, of="this model", last=found[-1][0].when)


def _of_others(
    kind: RateKind, others: Sequence[SpeedRecord], plan: Plan, families: Mapping[str, QuantFamily]
) -> Correction | None:
    counts: dict[str, int] = {}
    first = []
    for one in others:
        ratio = _ratio(kind, one, one.predicted)
        if ratio is not None and counts.setdefault(one.model_id, 0) < FIRST:
            counts[one.model_id] += 1
            first.append((one, ratio))
    mine = main_family(types_of(plan.profile))
    alike = [(one, ratio) for one, ratio in first if families.get(one.model_id) == mine]
    close = len(alike) >= ENOUGH
    used = alike if close else first
    if not used:
        return None
    models = len({one.model_id for one, _ in used})
    words = "another model" if models == 1 else f"{models} other models"
    return correction(
        [ratio for _, ratio in used],
        expected=ALIKE if close else ANY,
        last=used[-1][0].when,
        of=words + (" with weights of the same kind" if close else ""),
    )


def _ratio(kind: RateKind, speed: SpeedRecord, forecast: Figures) -> float | None:
    """Seconds measured over seconds forecast."""
    name = f"{kind}_tok_s"
    measured = getattr(speed.figures, name)
    computed = getattr(forecast, name)
    if not measured or not computed or not math.isfinite(measured) or measured < 0:
        return None
    return float(computed / measured)


def _rates(own: Sequence[SpeedRecord], plan: Plan) -> dict[str, float]:
    """The rate of host memory derived from decode speed, if it is the only unknown fact."""
    written = [one for one in own if one.figures.decode_tok_s][-_SOLVED:]
    if not written or any(predicted(plan, one).decode_tok_s is not None for one in written):
        return {}
    for tier in (tier.name for tier in plan.machine.tiers() if tier.kind in ("dram", "pmem")):
        found = [rate for one in written if (rate := _rate(tier, one, plan)) is not None]
        if found:
            return {tier: median(found)}
    return {}


def _rate(tier: str, speed: SpeedRecord, plan: Plan) -> float | None:
    """The rate whose predicted speed is closest to the measured one; None if other facts are also unknown."""

    def at(rate: float) -> float | None:
        return predicted(plan, speed, Calibration({tier: rate})).decode_tok_s

    unlimited = at(_RATES_GB_S[1])
    if unlimited is None:
        return None
    # if the speed is not reached even with unlimited memory, memory is not the bottleneck: use a nearly unlimited rate
    wanted = min(speed.figures.decode_tok_s or 0.0, _ENDLESS * unlimited)
    return _meeting(lambda rate: (at(rate) or 0.0) >= wanted, *_RATES_GB_S)


def _meeting(enough: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest value that satisfies the monotonic predicate; `high` if none does."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
