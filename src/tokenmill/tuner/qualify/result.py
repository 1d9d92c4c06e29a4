"""Scores, thresholds and the verdict of a quality check. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.tuner.qualify.agreement import Agreement, Place

CheckName = Literal["needle", "json", "python", "c-like", "repeat", "agreement"]
MAX_FAILURES = 4  # shown per check
# Thresholds. Llama 3 8B compared with its F16 (llama.cpp, tools/perplexity/README.md): Q4_K_M has a divergence of
# 0.031 and 91.9 % same tokens, IQ3_S one of 0.111; users of IQ3_S report forgotten quotes and semicolons.
WANTED: dict[CheckName, float] = {
    "needle": 0.9,
    "json": 0.9,
    "python": 0.9,
    "c-like": 0.9,
    "repeat": 1.0,
    "agreement": 0.9,
}
MAX_KL = 0.06
USES: dict[CheckName, str] = {
    "needle": "finding facts in long documents",
    "json": "structured output without a grammar",
    "python": "writing Python",
    "c-like": "writing C, Java and JavaScript",
    "repeat": "reproducible answers",
    "agreement": "replacing the reference",
}


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """One wrong answer."""

    asked: str
    why: str
    said: str  # beginning of the answer


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: CheckName
    score: float  # share of correct answers
    threshold: float  # minimum score
    good: bool
    words: str
    asked: int
    failures: tuple[WrongAnswer, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QualifyStep:
    """Progress of a run."""

    check: CheckName
    done: int
    total: int
    of: str | None = None  # name of the engine, if there are two


Tell = Callable[[QualifyStep], None]


def check(name: CheckName, asked: int, failures: Sequence[WrongAnswer], words: str, figures: dict[str, float]) -> Check:
    """A check whose score is the share of correct answers."""
    score = (asked - len(failures)) / asked if asked else 0.0
    threshold = WANTED[name]
    return Check(
        name,
        score,
        threshold,
        bool(asked) and score >= threshold,
        words,
        asked,
        tuple(failures[:MAX_FAILURES]),
        figures,
    )


def agreed(found: Agreement) -> Check:
    """The check for a model's agreement with its reference."""
    good = found.same_top >= WANTED["agreement"] and found.kl_mean <= MAX_KL
    words = (
        f"same most likely token at {found.same_top:.1%} of {found.positions:,} positions; KL divergence "
        f"{found.kl_mean:.4f} on average, {found.kl_p95:.3f} at the 95th percentile, {found.kl_max:.3f} at most"
    )
    figures = {
        "positions": float(found.positions),
        "same_top": found.same_top,
        "kl_mean": found.kl_mean,
        "kl_p95": found.kl_p95,
        "kl_max": found.kl_max,
        "most_kl_mean": MAX_KL,
    }
    if found.perplexity is not None and found.perplexity_reference is not None:
        words += f"; perplexity {found.perplexity:.4g}, the reference's {found.perplexity_reference:.4g}"
        figures |= {"perplexity": found.perplexity, "perplexity_reference": found.perplexity_reference}
    failures = tuple(_apart(*one) for one in found.worst if one[0].top[0][0] != one[1].top[0][0])
    return Check("agreement", found.same_top, WANTED["agreement"], good, words, found.positions, failures, figures)


def verdict(checks: Sequence[Check]) -> str:
    """One sentence: the uses for which the model is good enough."""
    good, poor = ([USES[check.name] for check in checks if check.good is side] for side in (True, False))
    if not poor:
        return f"good enough for {_listed(good)}"
    return f"not good enough for {_listed(poor)}" + (f"; good enough for {_listed(good)}" if good else "")


def _apart(mine: Place, other: Place, value: float) -> WrongAnswer:
    said, wanted = (place.top[0][0].decode(errors="replace") for place in (mine, other))
    why = f"the reference predicts {wanted!r}; divergence {value:.3f}"
    return WrongAnswer(f"{mine.text}, position {mine.position}", why, repr(said))


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
