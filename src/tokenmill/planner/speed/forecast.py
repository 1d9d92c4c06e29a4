"""Predicts decode and prefill speed as sums of named terms, and the duration of the load.

Depth is the number of tokens already in each sequence's context; tok/s are totals of all sequences. Figures that
depend on an unknown fact of the machine are omitted, and a note names the fact.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Confidence, Forecast, Placement, Settings, Speed, Term
from tokenmill.planner.speed.calibration import Calibration, Correction
from tokenmill.planner.speed.devices import Devices, devices
from tokenmill.planner.speed.intervals import MachineClass, factors, machine_class
from tokenmill.planner.speed.load_time import load_time
from tokenmill.planner.speed.rates import RateConstants, standard
from tokenmill.planner.speed.step_time import Missing, decode_terms, offload_threshold, prefill_terms
from tokenmill.planner.speed.work import StepWork, work
from tokenmill.units import format_tok_s

__all__ = ["Calibration", "Correction", "decode_speed", "forecast", "prefill_speed"]

MEASURE = "measure it there: tokenmill probe --measure -o machine.toml; then plan with --machine machine.toml"
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
UBATCHES = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class _Given:
    """Inputs shared by all points of one forecast."""

    work: StepWork
    devices: Devices
    settings: Settings
    rates: RateConstants
    calibration: Calibration | None
    min_batch: int | None
    machine_class: MachineClass


def forecast(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    *,
    calibration: Calibration | None = None,
    min_batch: int | None = None,
) -> Forecast:
    """Forecast decode by depth and sequences, prefill by depth and micro-batch, and load times.

    `min_batch` overrides the settings' GGML_OP_OFFLOAD_MIN_BATCH; `calibration` corrects the result.
    """
    given = _given(machine, profile, settings, placement, calibration, min_batch)
    notes = list(given.devices.notes)
    context = settings.context
    depths = sorted({0, context // 4, context // 2, context})
    sequences = sorted({*SEQUENCES, settings.sequences})
    missing: dict[str, None] = {}  # an ordered set
    decode = _known(missing, "decode", partial(_decode, given), product(depths, sequences))
    if decode and decode[0].sequences > 1:
        decode = []  # all depths of one sequence are unknown; figures for several alone would mislead
    # prefill at full context is impossible: the cache has no free cells
    by_depth = [(depth, None, settings.ubatch) for depth in depths if depth < context]
    by_size = [(0, None, size) for size in UBATCHES if size != settings.ubatch and size <= context]
    prefill = _known(missing, "prefill", partial(_prefill, given), (*by_depth, *by_size))
    notes += missing
    notes += _corrections(calibration)
    notes += _cliff(given, decode)
    load = load_time(machine, profile, settings, placement, given.rates)
    return Forecast(
        decode=tuple(decode),
        prefill=tuple(prefill),
        load_cold_s=load.cold_s,
        load_warm_s=load.warm_s,
        load_bound_by=load.bound_by,
        notes=(*notes, *load.notes),
    )


def _known(
    missing: dict[str, None], kind: str, speed: Callable[..., Speed], points: Iterable[tuple[int | None, ...]]
) -> list[Speed]:
    """The points that can be computed; a note for each fact that the others lack is added to `missing`."""
    found = []
    lacking = []
    for point in points:
        try:
            found.append(speed(*point))
        except Missing as lack:
            lacking.append(str(lack))
    for fact in lacking:
        what = f"no forecast of {kind}" if not found else f"no forecast of {kind} at some depths or batch sizes"
        missing[f"{what}: {fact} is unknown; {MEASURE}"] = None
    return sorted(found, key=lambda speed: (speed.ubatch != found[0].ubatch, speed.sequences, speed.depth))


def decode_speed(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    *,
    depth: int,
    sequences: int = 1,
    calibration: Calibration | None = None,
    min_batch: int | None = None,
) -> Speed | None:
    """One point of decode; None if a fact is unknown."""
    try:
        return _decode(_given(machine, profile, settings, placement, calibration, min_batch), depth, sequences)
    except Missing:
        return None


def prefill_speed(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    *,
    depth: int,
    prompt: int | None = None,
    calibration: Calibration | None = None,
    min_batch: int | None = None,
) -> Speed | None:
    """Speed of prefilling `prompt` tokens (None: one micro-batch) after `depth` others; None if a fact is unknown."""
    given = _given(machine, profile, settings, placement, calibration, min_batch)
    try:
        return _prefill(given, depth, prompt, settings.ubatch)
    except Missing:
        return None


def _given(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    calibration: Calibration | None,
    min_batch: int | None,
) -> _Given:
    step = work(profile, placement, settings)
    rates = standard()
    found = devices(machine, settings, rates, step.resident_bytes(), calibration)
    return _Given(step, found, settings, rates, calibration, min_batch, machine_class(machine, placement))


def _decode(given: _Given, depth: int, sequences: int) -> Speed:
    terms = decode_terms(
        given.work,
        given.devices,
        given.settings,
        given.rates,
        depth=depth,
        sequences=sequences,
        min_batch=given.min_batch,
    )
    correction = given.calibration.decode if given.calibration is not None else None
    terms = _corrected(terms, correction)
    tok_s = _rate(sequences, terms)
    ends = factors("decode", given.machine_class, correction)
    return Speed(
        tok_s,
        depth,
        sequences,
        tuple(terms),
        _confidence(given, terms, correction),
        low_tok_s=tok_s * ends.low,
        high_tok_s=tok_s * ends.high,
    )


def _prefill(given: _Given, depth: int, prompt: int | None, ubatch: int) -> Speed:
    tokens = prompt or ubatch
    terms = prefill_terms(
        given.work,
        given.devices,
        given.settings,
        given.rates,
        depth=depth,
        prompt=tokens,
        ubatch=ubatch,
        min_batch=given.min_batch,
    )
    correction = given.calibration.prefill if given.calibration is not None else None
    terms = _corrected(terms, correction)
    # terms are per token, as in decode
    each = [Term(term.name, term.seconds / tokens, term.bytes and term.bytes / tokens, term.gb_s) for term in terms]
    tok_s = _rate(1, each)
    ends = factors("prefill", given.machine_class, correction)
    return Speed(
        tok_s,
        depth,
        1,
        tuple(each),
        _confidence(given, terms, correction),
        ubatch,
        low_tok_s=tok_s * ends.low,
        high_tok_s=tok_s * ends.high,
    )


def _rate(tokens: int, terms: Sequence[Term]) -> float:
    return tokens / sum(term.seconds for term in terms)


def _corrected(terms: list[Term], correction: Correction | None) -> list[Term]:
    if correction is None:
        return terms
    by = correction.factor
    return [Term(term.name, term.seconds * by, term.bytes, term.gb_s and term.gb_s / by) for term in terms]


def _corrections(calibration: Calibration | None) -> list[str]:
    """One note per correction, with the measurements behind it."""
    if calibration is None:
        return []
    kinds = (("decode", calibration.decode), ("prefill", calibration.prefill))
    return [f"the {kind} forecast was multiplied by {1 / one.factor:.2f}: {one.grounds}" for kind, one in kinds if one]


def _confidence(given: _Given, terms: Sequence[Term], correction: Correction | None) -> Confidence:
    """`calibrated` with runs of this machine or a measured rate of the dominant memory, else `estimated`."""
    if correction is not None:
        return "calibrated"
    seconds: dict[str, float] = {}
    for term in terms:
        tier = term.name.split()[0]
        if tier in ("dram", "pmem", "disk") or tier.startswith("gpu"):
            seconds[tier] = seconds.get(tier, 0.0) + term.seconds
    slowest = max(seconds, key=lambda tier: seconds[tier], default=None)
    return "calibrated" if slowest in given.devices.measured else "estimated"


def _cliff(given: _Given, decode: Sequence[Speed]) -> list[str]:
    """A note if more sequences are slower in total than fewer, because experts are copied over PCIe in every step."""
    threshold = offload_threshold(given.work, given.settings, given.min_batch)
    if threshold is None or threshold > max(SEQUENCES):
        return []
    best = max(
        (speed for speed in decode if speed.depth == 0 and speed.sequences < threshold),
        key=lambda speed: speed.tok_s,
        default=None,
    )
    over = next((speed for speed in decode if speed.depth == 0 and speed.sequences >= threshold), None)
    if best is None or over is None or over.tok_s >= best.tok_s:
        return []
    return [
        f"from {threshold} sequences the engine copies experts over PCIe in every step: {format_tok_s(over.tok_s)} "
        f"tok/s with {over.sequences} sequences, {format_tok_s(best.tok_s)} with {best.sequences}; "
        "GGML_OP_OFFLOAD_MIN_BATCH=128 raises that limit"
    ]
