"""Stores operating points and trials of `tokenmill tune` in the measurement journal.

Trials are on disk before they are used. A point applies to its machine, the exact bytes of its model and its engine's
build; for another combination, `find` returns the reason why it does not apply.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill import measurements
from tokenmill.tuner.point import Aim, OperatingPoint, PointScope, Trial


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial as it is stored."""

    place: PointScope
    work: str  # name of the measured requests; only trials with the same one are comparable
    trial: Trial
    made_for: str = ""  # aim of the run that made it


@dataclass(frozen=True, slots=True)
class FoundPoint:
    """A point that applies here, or the reason why a stored one does not."""

    point: OperatingPoint | None = None
    why_not: str | None = None  # None: no point of this model is stored


def save_point(state: Path, point: OperatingPoint) -> Path:
    """Store a point, replacing that of the same machine, model and engine; returns the journal's path."""
    measurements.replace(state, "point", point)
    return measurements.journal_path(state)


def load_point(state: Path, place: PointScope) -> OperatingPoint | None:
    """The point that applies to this machine, model and build, or None."""
    return find(state, place).point


def find(state: Path, place: PointScope) -> FoundPoint:
    """Like `load_point`, with the reason if only a point for another scope exists."""
    stored = points(state)
    for point in stored:
        own = point.place
        if (own.machine_id, own.model_id, own.engine) != (place.machine_id, place.model_id, place.engine):
            continue
        if own.build == place.build:
            return FoundPoint(point)
        return FoundPoint(why_not=f"the {_named(point)} was measured with {own.build}, and this is {place.build}")
    for other in sorted(stored, key=lambda point: point.when, reverse=True):
        if other.place.engine != place.engine or other.place.model != place.model:
            continue
        if other.place.model_id == place.model_id:
            return FoundPoint(why_not=f"the {_named(other)} was measured on another machine, {other.place.machine}")
        if other.place.machine_id == place.machine_id:
            return FoundPoint(why_not=f"the {_named(other)} was measured with another file of {place.model}")
    return FoundPoint()


def has_points(state: Path) -> bool:
    """Whether any point is stored."""
    return bool(measurements.read_json(state, "point"))


def points(state: Path) -> list[OperatingPoint]:
    """All stored points."""
    return list(measurements.read(state, "point", OperatingPoint))


def keep_trial(state: Path, place: PointScope, work: str, trial: Trial, aim: Aim | None = None) -> None:
    """Store a trial; it is on disk when this returns."""
    measurements.append(state, "trial", StoredTrial(place, work, trial, _aim_name(aim)))


def trials_of(state: Path, place: PointScope, work: str, aim: Aim) -> tuple[Trial, ...]:
    """Trials with the same scope and work, for any aim; for latency, only those that measured it."""
    return tuple(kept.trial for kept in _kept(state, place, work, aim))


def for_others(state: Path, place: PointScope, work: str, aim: Aim) -> tuple[Trial, ...]:
    """The trials of `trials_of` that were made for another aim."""
    return tuple(kept.trial for kept in _kept(state, place, work, aim) if kept.made_for != _aim_name(aim))


def _kept(state: Path, place: PointScope, work: str, aim: Aim) -> Iterator[StoredTrial]:
    of_place = {"machine_id": place.machine_id, "model_id": place.model_id, "engine": place.engine}
    for kept in measurements.read(state, "trial", StoredTrial, **of_place):
        figures = kept.trial.figures
        usable = aim.kind != "latency" or kept.trial.outcome != "measured" or figures.first_token_s is not None
        if usable and kept.place == place and kept.work == work:
            yield kept


def _aim_name(aim: Aim | None) -> str:
    return "" if aim is None else f"{aim.kind} {aim.first_token_s} {aim.within}"


def forget_trials(state: Path, place: PointScope) -> None:
    """Delete the trials of a machine, model and engine; their speeds stay in the history."""
    measurements.delete(state, "trial", machine_id=place.machine_id, model_id=place.model_id, engine=place.engine)


def _named(point: OperatingPoint) -> str:
    return f"operating point of {point.when[:10]}"
