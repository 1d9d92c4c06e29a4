"""The objective of each aim: a number that the search maximises, and the choice among measured trials.

A trial without the deciding figure is not a candidate.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenmill.tuner.point import Aim, Figures, Trial, TrialSettings
from tokenmill.tuner.search.noise import Standing

ThroughputMetric = Literal["jobs_tok_s", "decode_tok_s"]
LATENESS = 3  # exponent of the penalty for a late first token


@dataclass(frozen=True, slots=True)
class Yardstick:
    """An aim and the figure to maximise for it."""

    aim: Aim
    throughput_figure: ThroughputMetric
    by: Literal["throughput", "first token", "in time", "joules"]

    def tok_s(self, figures: Figures) -> float | None:
        """The throughput among figures."""
        found: float | None = getattr(figures, self.throughput_figure)
        return found

    def worth(self, figures: Figures) -> float | None:
        """Worth of figures, higher is better. A late first token lowers it gradually, to guide the search."""
        tok_s = self.tok_s(figures)
        first_s = figures.first_token_s
        joules = figures.joules_per_token
        if self.by == "joules":
            return 1 / joules if joules else None
        if self.by == "first token":
            return 1 / first_s if first_s else None
        if self.by == "in time":
            limit = self.aim.first_token_s
            if tok_s is None or first_s is None or limit is None:
                return None
            return tok_s * min(1.0, limit / max(first_s, 1e-9)) ** LATENESS
        return tok_s

    def in_time(self, figures: Figures) -> bool:
        """Whether the first token meets the aim's limit; True without a limit."""
        limit = self.aim.first_token_s
        if self.by != "in time" or limit is None:
            return True
        return figures.first_token_s is not None and figures.first_token_s <= limit


def yardstick(aim: Aim, trials: Iterable[Trial]) -> Yardstick:
    """The yardstick for trials, which depends on the figures that they have."""
    figures = [trial.figures for trial in trials if trial.counts]
    jobs = any(each.jobs_tok_s is not None for each in figures)
    by: Literal["throughput", "first token", "in time", "joules"] = "throughput"
    if aim.kind == "energy" and any(each.joules_per_token for each in figures):
        by = "joules"
    if aim.kind == "latency" and any(each.first_token_s is not None for each in figures):
        by = "first token" if aim.first_token_s is None else "in time"
    return Yardstick(aim, "jobs_tok_s" if jobs else "decode_tok_s", by)


def cores(settings: TrialSettings) -> int:
    """Number of cores that settings use."""
    return max(settings.threads, settings.threads_batch)


def choose(yard: Yardstick, found: Sequence[Standing], noise: float) -> Standing | None:
    """The best measured settings; among those within noise, the one that needs the fewest resources."""
    aim = yard.aim
    candidates = [
        each
        for each in found
        if each.dials.context >= (aim.least_context or 0) and each.dials.sequences >= aim.least_sequences
    ]
    worth = {each.dials: value for each in candidates if (value := yard.worth(each.figures)) is not None}
    candidates = [each for each in candidates if each.dials in worth]
    if not candidates:
        return None
    if not any(yard.in_time(each.figures) for each in candidates):  # choose the earliest
        return min(candidates, key=lambda each: (each.figures.first_token_s or 0.0, -worth[each.dials]))
    candidates = [each for each in candidates if yard.in_time(each.figures)]
    top = max(worth[each.dials] for each in candidates)
    if aim.kind in ("cores", "context"):
        enough = [each for each in candidates if worth[each.dials] >= top * (1 - aim.within)]
        key: Callable[[Standing], tuple[float, ...]] = (
            (lambda each: (cores(each.dials), each.dials.threads, -worth[each.dials]))
            if aim.kind == "cores"
            else (lambda each: (-each.dials.context, -worth[each.dials]))
        )
        return min(enough, key=key)
    alike = [each for each in candidates if worth[each.dials] >= top * (1 - noise / 2)]
    return min(alike, key=lambda each: (cores(each.dials), each.dials.sequences, each.dials.ubatch, -worth[each.dials]))
