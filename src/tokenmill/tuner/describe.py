"""Renders a tuning run as text of at most 80 columns: what will be measured, and each trial."""

from collections.abc import Iterator, Sequence
from textwrap import fill, shorten
from typing import Protocol

from tokenmill.planner.plan import Plan
from tokenmill.tuner.engine_rig import most_starts
from tokenmill.tuner.point import Aim, Figures, Trial, TrialSettings
from tokenmill.tuner.search.space import Space
from tokenmill.tuner.trial_run import TrialStep
from tokenmill.units import format_bytes, format_seconds, number_of

AROUND_S = 4.0  # seconds of a trial in addition to the measurement: new context, warm-up, shared prefix
_NAMES = {
    "sequences": "sequences",
    "threads": "threads",
    "ubatch": "micro-batch",
    "threads_batch": "threads for prefill",
    "context": "context",
    "cache_types": "cache types",
    "flash_attention": "flash attention",
    "mmap": "mmap",
    "repack": "repack",
    "offload_min_batch": "offload threshold",
    "placement": "placement",
}
_AIMS = {
    "throughput": "most tokens of a batch",
    "latency": "most tokens while the first one of others comes in time",
    "cores": "fewest threads",
    "context": "most context",
    "energy": "least energy for a token",
}
_COLUMNS = 80
_DETAIL_CHARS = 110


class Searching(Protocol):
    """The part of a search that `announced` uses."""

    def remaining(self) -> int:
        """Expected number of remaining trials."""

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        """Settings that need further loads."""


def announced(
    plan: Plan,
    aim: Aim,
    space: Space,
    search: Searching,
    known: Sequence[Trial],
    seconds: float,
    *,
    kind: str,
    jobs: int | None = None,
) -> Iterator[str]:
    """Lines about the settings to vary, loads and expected time; `jobs` is the number of jobs if the user gave some."""
    yield _folded(f"aim: {_aim_words(aim)}; {_work_words(aim, jobs)}")
    dials = [f"{_NAMES[dial]} {_range(space.values(dial))}" for dial in (*space.free, *space.reload)]
    yield _folded(f"varied: {', '.join(dials) or 'nothing'}; {number_of(space.all(), 'combination')}")
    yield from map(_folded, space.reasons)
    trials = search.remaining()
    load_s = plan.forecast.load_warm_s or 0.0
    if kind == "native":
        loads = 1 + len(search.loads_needed())
        words = number_of(loads, "load")
    else:
        loads = min(trials, most_starts(space))
        words = f"at most {number_of(loads, 'start')} of {kind}"
    took = [trial.seconds for trial in known if trial.outcome == "measured" and not trial.loaded]
    each = sum(took) / len(took) if took else seconds + AROUND_S
    there = f"; {number_of(len(known), 'trial')} from before count" if known else ""
    yield _folded(
        f"about {number_of(trials, 'trial')}, {words}, {format_seconds(trials * each + loads * load_s)}{there}"
    )


def progress_line(step: TrialStep) -> str:
    """A trial on a line of 80 columns."""
    trial = step.trial
    head = f"{step.number:3}  {dials_words(trial.dials)}: "
    if trial.outcome != "measured":
        return _folded(head + f"{trial.outcome}" + (f", {_cut(trial.detail)}" if trial.detail else ""))
    words = head + figures_words(trial.figures)
    if trial.disturbed is not None:
        return _folded(f"{words}; does not count: {trial.disturbed}")
    best = step.best
    if best is not None and best.dials != trial.dials:
        words += f" (best {_rate(best.figures)})"
    return _folded(words)


def dials_words(dials: TrialSettings, *, whole: bool = False) -> str:
    """Trial settings as text; `whole` includes those at their usual values."""
    parts = [number_of(dials.sequences, "seq", "seqs"), number_of(dials.threads, "thread")]
    if dials.threads_batch != dials.threads:
        parts[-1] += f"/{dials.threads_batch}"
    parts.append(f"ubatch {dials.ubatch}")
    if whole:
        parts = [number_of(dials.sequences, "sequence"), number_of(dials.threads, "thread")]
        parts += [f"{dials.threads_batch} for prefill", f"micro-batch {dials.ubatch}", f"context {dials.context:,}"]
    if whole or (dials.cache_type_k, dials.cache_type_v) != ("f16", "f16"):
        types = dict.fromkeys((dials.cache_type_k, dials.cache_type_v))
        parts.append("/".join(types) + (" cache" if whole else ""))
    if not dials.flash_attention:
        parts.append("no flash attention" if whole else "no fa")
    parts += [word for word, off in (("no mmap", not dials.mmap), ("no repack", not dials.repack)) if off]
    if dials.offload_min_batch is not None:
        parts.append(f"offload from {dials.offload_min_batch}")
    return ", ".join(parts)


def figures_words(figures: Figures, *, whole: bool = False) -> str:
    """Figures as text, most important first."""
    parts = []
    if figures.jobs_tok_s is not None:
        parts.append(f"{number_words(figures.jobs_tok_s)} tok/s" + (" of a batch, prompts counted" if whole else ""))
    if figures.decode_tok_s is not None and (whole or not parts):
        parts.append(f"{number_words(figures.decode_tok_s)} tok/s decoding")
    if figures.prefill_tok_s is not None and whole:
        parts.append(f"{number_words(figures.prefill_tok_s)} tok/s prefill")
    if figures.first_token_s is not None:
        parts.append(f"first token {short_seconds(figures.first_token_s)}" + (" beside a batch" if whole else ""))
    if figures.joules_per_token is not None:
        parts.append(f"{number_words(figures.joules_per_token)} J a token")
    for bytes_, where in ((figures.host_bytes, "host"), (figures.gpu_bytes, "GPU")):
        if whole and bytes_ is not None:
            parts.append(f"{format_bytes(bytes_)} {where} memory")
    return ", ".join(parts)


def _aim_words(aim: Aim) -> str:
    words = _AIMS[aim.kind]
    if aim.first_token_s is not None:
        words += f", within {short_seconds(aim.first_token_s)}"
    if aim.kind in ("cores", "context"):
        words += f" within {aim.within:.0%} of the best speed"
    return words


def _work_words(aim: Aim, jobs: int | None) -> str:
    if jobs is not None:
        return f"measured with {number_of(jobs, 'job')} of the file"
    return f"jobs of {aim.prompt_tokens} shared + {aim.tail_tokens} own tokens, {aim.output_tokens} written"


def _range(values: Sequence[object]) -> str:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values) and len(values) > 6:
        return f"{values[0]}-{values[-1]}"
    return "/".join(_value(value) for value in values)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(dict.fromkeys(map(str, value)))
    return "default" if value is None else str(value)


def _rate(figures: Figures) -> str:
    return number_words(figures.jobs_tok_s if figures.jobs_tok_s is not None else figures.decode_tok_s) or "?"


def number_words(value: float | None) -> str:
    """A figure with three digits; empty if it was not measured."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _folded(text: str) -> str:
    return fill(text, _COLUMNS, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False)


def _cut(detail: str) -> str:
    """The beginning of an engine's error detail; the trial stores all of it."""
    return shorten(detail, _DETAIL_CHARS, placeholder=" ...")


def short_seconds(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
