"""Derives the operating point from the trials: the choice, its trade-offs, the front and the knee."""

from collections.abc import Sequence

from tokenmill.errors import TokenmillError
from tokenmill.tuner.point import Aim, OperatingPoint, PointScope, Trial
from tokenmill.tuner.search.noise import Standing, standings
from tokenmill.tuner.search.objectives import choose, yardstick
from tokenmill.tuner.search.tradeoffs import front, given_up, knee


def point(
    place: PointScope,
    aim: Aim,
    trials: Sequence[Trial],
    noise: float,
    *,
    seconds: float,
    when: str,
    host_experts: bool | None = None,
) -> OperatingPoint:
    """The best operating point for the aim; raises TokenmillError if no trial can be judged.

    `host_experts`: whether a GPU computes layers whose experts are in host memory; None: inferred from memory use.
    """
    yard = yardstick(aim, trials)
    found = standings(trials)
    chosen = choose(yard, found, noise)
    if chosen is None:
        raise TokenmillError(_nothing(trials), hint="run `tokenmill doctor` to check the machine and the engine")
    held = front(found, yard, noise, chosen)
    on_host = _on_host(found) if host_experts is None else host_experts
    return OperatingPoint(
        place=place,
        aim=aim,
        dials=chosen.dials,
        figures=chosen.figures,
        noise=noise,
        given_up=given_up(yard, chosen, held, found, noise),
        knee=knee(yard, found, trials, chosen, noise, host_experts=on_host),
        front=tuple(each.as_trial() for each in held),
        trials=tuple(trials),
        loads=sum(trial.loaded for trial in trials),
        seconds=seconds,
        when=when,
    )


def _nothing(trials: Sequence[Trial]) -> str:
    if not trials:
        return "no trial was made"
    last = trials[-1]
    if all(trial.disturbed is not None for trial in trials):
        return f"all {len(trials)} trials were disturbed, the last by {last.disturbed}"
    return f"none of {len(trials)} trials could be judged; the last one: {last.detail or last.outcome}"


def _on_host(found: Sequence[Standing]) -> bool:
    """Whether so much host memory is used in addition to a GPU that it must contain weights."""
    return any(
        figures.gpu_bytes and figures.host_bytes and 2 * figures.host_bytes >= figures.gpu_bytes
        for figures in (each.figures for each in found)
    )
