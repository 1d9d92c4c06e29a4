"""What was found and what was tried, kept: `<state>/points/`, for each machine, model and kind of engine.

    MACHINE-MODEL-ENGINE.json           the operating point, replaced in one step
    MACHINE-MODEL-ENGINE.trials.jsonl   every trial as it ended, on the disk before it counts

A point holds for its machine, its model's very bytes and its engine's build; with another of them it is not used, and
the reason is said.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenmill.decode import decode
from tokenmill.engine import measured
from tokenmill.errors import ConfigError, EngineError
from tokenmill.tuner.point import Aim, OperatingPoint, PointScope, Trial

FOLDER = "points"
_ID_CHARS = 16  # of a hash, in a file's name


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A line of trials."""

    place: PointScope
    work: str  # what was measured with: trials with other work cannot be compared
    trial: Trial
    made_for: str = ""  # the aim it was made for; others count it too


@dataclass(frozen=True, slots=True)
class Found:
    """A point that holds here, or why one that is there does not."""

    point: OperatingPoint | None = None
    why_not: str | None = None  # None: nothing was ever tuned


def point_path(state: Path, place: PointScope) -> Path:
    """Where a place's point is kept."""
    return state / FOLDER / f"{place.machine_id[:_ID_CHARS]}-{place.model_id[:_ID_CHARS]}-{place.engine}.json"


def trials_path(state: Path, place: PointScope) -> Path:
    """Where its trials are."""
    return point_path(state, place).with_suffix(".trials.jsonl")


def save_point(state: Path, point: OperatingPoint) -> Path:
    """Keep a point, whole or not at all; where."""
    path = point_path(state, point.place)
    text = json.dumps(asdict(point), ensure_ascii=False, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        measured.replace_whole(path, text.encode())
    except OSError as error:
        raise EngineError(
            f"cannot keep the operating point in {path.parent}: {error.strerror}",
            hint="check state_dir and the room on its disk; its trials are kept, so tuning again takes no time",
        ) from error
    return path


def load_point(state: Path, place: PointScope) -> OperatingPoint | None:
    """The point of this very place; None: there is none that holds."""
    return find(state, place).point


def find(state: Path, place: PointScope) -> Found:
    """The same, with the reason where a point of another place is all there is."""
    point = _read(point_path(state, place))
    if point is not None and point.place.model_id == place.model_id and point.place.machine_id == place.machine_id:
        if point.place.build == place.build:
            return Found(point)
        return Found(why_not=f"the {_named(point)} is of {point.place.build}, and this is {place.build}")
    for other in sorted(points(state), key=lambda point: point.when, reverse=True):
        if other.place.engine != place.engine or other.place.model != place.model:
            continue
        if other.place.model_id == place.model_id:
            return Found(why_not=f"the {_named(other)} is of another machine, {other.place.machine}")
        if other.place.machine_id == place.machine_id:
            return Found(why_not=f"the {_named(other)} is of another file of {place.model}")
    return Found()


def has_points(state: Path) -> bool:
    """Whether anything was ever tuned here."""
    return next((state / FOLDER).glob("*.json"), None) is not None


def points(state: Path) -> Iterator[OperatingPoint]:
    """Every point that can be read."""
    for path in sorted((state / FOLDER).glob("*.json")):
        point = _read(path)
        if point is not None:
            yield point


def keep_trial(state: Path, place: PointScope, work: str, trial: Trial, aim: Aim | None = None) -> None:
    """Add a trial: on the disk when this returns."""
    measured.append_line(trials_path(state, place), asdict(StoredTrial(place, work, trial, _aim_name(aim))))


def trials_of(state: Path, place: PointScope, work: str, aim: Aim) -> tuple[Trial, ...]:
    """Trials of the same place with the same work, whatever they were made for; for latency, those that measured it."""
    return tuple(kept.trial for kept in _kept(state, place, work, aim))


def for_others(state: Path, place: PointScope, work: str, aim: Aim) -> tuple[Trial, ...]:
    """Those of them that were made for another aim."""
    return tuple(kept.trial for kept in _kept(state, place, work, aim) if kept.made_for != _aim_name(aim))


def _kept(state: Path, place: PointScope, work: str, aim: Aim) -> Iterator[StoredTrial]:
    for kept in measured.read_lines(trials_path(state, place), StoredTrial):
        figures = kept.trial.figures
        told = aim.kind != "latency" or kept.trial.outcome != "measured" or figures.first_token_s is not None
        if told and kept.place == place and kept.work == work:
            yield kept


def _aim_name(aim: Aim | None) -> str:
    return "" if aim is None else f"{aim.kind} {aim.first_token_s} {aim.within}"


def forget_trials(state: Path, place: PointScope) -> None:
    """Begin anew; what was measured stays in the machine's history."""
    trials_path(state, place).unlink(missing_ok=True)


def _read(path: Path) -> OperatingPoint | None:
    try:
        data = json.loads(path.read_bytes())
        return decode(OperatingPoint, data, where=path.name) if isinstance(data, dict) else None
    except (OSError, ValueError, ConfigError):
        return None


def _named(point: OperatingPoint) -> str:
    return f"operating point of {point.when[:10]}"
