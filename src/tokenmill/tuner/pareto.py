"""What nothing else beats in everything: throughput, first token, cores, context, energy, over what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.tuner.aims import Yardstick, cores
from tokenmill.tuner.noise import Standing


@dataclass(frozen=True, slots=True)
class Score:
    """More is better in each; None: not measured, and not compared."""

    measured: tuple[float | None, ...]  # throughput, first token, energy: only as good as their noise
    exact: tuple[float, ...]  # cores, context


def score(standing: Standing, yard: Yardstick) -> Score:
    """How dials do in each respect."""
    figures = standing.figures
    dials = standing.dials
    less = (figures.first_token_s, figures.joules_per_token)
    return Score(
        (yard.tok_s(figures), *(1 / value if value else None for value in less)),
        (-float(cores(dials)), float(dials.context)),
    )


def front(found: Sequence[Standing], yard: Yardstick, noise: float, chosen: Standing) -> tuple[Standing, ...]:
    """The chosen one first, then those that it and each other leave standing, the fastest first.

    One that is better only by noise, in what was measured, is not better.
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
    """Whether one is nowhere worse than another, but by noise, and somewhere better.

    Two that are equal in everything do not beat each other; without noise this is Pareto's order.
    """
    pairs = [(a, b) for a, b in zip(one.measured, other.measured, strict=True) if a is not None and b is not None]
    if any(a < b * (1 - noise) for a, b in pairs) or any(a < b for a, b in zip(one.exact, other.exact, strict=True)):
        return False
    within = noise > 0 and one.exact == other.exact  # the same but for noise: one of the two is enough
    return within or one.exact != other.exact or any(a > b for a, b in pairs)
