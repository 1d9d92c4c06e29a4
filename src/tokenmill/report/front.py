"""An operating point's trials as a picture: what is gained against what it costs. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.report.curves import dial_words
from tokenmill.tuner.point import Figures, OperatingPoint, Trial


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial as a dot."""

    x: float
    y: float
    words: str
    best: bool  # on the Pareto front
    chosen: bool


@dataclass(frozen=True, slots=True)
class Front:
    """Trials over what they cost."""

    x_name: str
    y_name: str
    trials: tuple[Tried, ...]
    whole: bool  # x has whole values only


_COSTS: tuple[tuple[str, bool, Callable[[Trial], float | None]], ...] = (
    ("seconds to the first token", False, lambda trial: trial.figures.first_token_s),
    ("joules per token", False, lambda trial: trial.figures.joules_per_token),
    ("tokens of context", True, lambda trial: float(trial.dials.context)),
    ("threads", True, lambda trial: float(trial.dials.threads)),
    ("sequences at once", True, lambda trial: float(trial.dials.sequences)),
)


def throughput(figures: Figures) -> tuple[str, float] | None:
    """What a batch gets: its jobs' tokens a second, else those decoded."""
    if figures.jobs_tok_s is not None:
        return "jobs", figures.jobs_tok_s
    return None if figures.decode_tok_s is None else ("decode", figures.decode_tok_s)


def front_of(point: OperatingPoint) -> Front | None:
    """The first cost in which the trials differ; None: there is nothing to compare."""
    gained = throughput(point.figures)
    if gained is None:
        return None
    held = {trial.dials: trial for trial in point.front}
    # the front's figures are already those of all runs of its dials together; of other dials the last run is shown
    last = {trial.dials: trial for trial in point.trials if trial.counts} | held
    kept = [
        (trial, found[1])
        for trial in last.values()
        if (found := throughput(trial.figures)) is not None and found[0] == gained[0]
    ]
    for name, whole, cost in _COSTS:
        placed = [(trial, x, y) for trial, y in kept if (x := cost(trial)) is not None]
        if len({x for _, x, _ in placed}) > 1:
            tried = tuple(
                Tried(x, y, dial_words(trial.dials), trial.dials in held, trial.dials == point.dials)
                for trial, x, y in placed
            )
            return Front(name, gained[0], tried, whole)
    return None
