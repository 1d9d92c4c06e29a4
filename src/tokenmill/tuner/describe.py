"""Renders a tuning run as text of at most 80 columns: the announcement, and one line per trial."""

from collections.abc import Iterator, Sequence
from textwrap import fill, shorten
from typing import Protocol

from tokenmill.planner.plan import Plan
from tokenmill.tuner.engine_rig import max_starts
from tokenmill.tuner.point import Aim, Figures, Trial, TrialSettings
from tokenmill.tuner.search.space import Space
from tokenmill.tuner.trial_run import TrialStep
from tokenmill.units import format_bytes, format_seconds, number_of

OVERHEAD_S = 4.0  # of a trial: new context, warm-up, shared prefix
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
    "throughput": "highest batch throughput",
    "latency": "highest batch throughput with a fast first token of interactive requests",
    "cores": "fewest threads",
    "context": "longest context",
    "energy": "least energy per token",
}
_COLUMNS = 80
_DETAIL_CHARS = 110


class SearchState(Protocol):
    """The part of a search that `announced` uses."""

    def remaining(self) -> int:
        """Expected number of remaining trials."""

    def loads_needed(self) -> tuple[TrialSettings, ...]:
        """Settings that need further loads."""


def announced(
    plan: Plan,
    aim: Aim,
    space: Space,
    search: SearchState,
    known: Sequence[Trial],
    seconds: float,
    *,
    kind: str,
    jobs: int | None = None,
) -> Iterator[str]:
    """Lines on the varied settings, loads and expected time. `jobs`: number of the user's jobs, if given."""
    yield _folded(f"aim: {_aim_words(aim)}; {_work_words(aim, jobs)}")
    varied = [f"{_NAMES[name]} {_range(space.values(name))}" for name in (*space.free, *space.reload)]
    yield _folded(f"varied: {', '.join(varied) or 'nothing'}; {number_of(space.all(), 'combination')}")
    yield from map(_folded, space.reasons)
    trials = search.remaining()
    load_s = plan.forecast.load_warm_s or 0.0
    if kind == "native":
        loads = 1 + len(search.loads_needed())
        words = number_of(loads, "load")
    else:
        loads = min(trials, max_starts(space))
        words = f"at most {number_of(loads, 'start')} of {kind}"
    took = [trial.seconds for trial in known if trial.outcome == "measured" and not trial.loaded]
    each = sum(took) / len(took) if took else seconds + OVERHEAD_S
    there = f"; {number_of(len(known), 'earlier trial')} reused" if known else ""
    yield _folded(
        f"about {number_of(trials, 'trial')}, {words}, {format_seconds(trials * each + loads * load_s)}{there}"
    )


def progress_line(step: TrialStep) -> str:
    """A trial on a line of 80 columns."""
    trial = step.trial
    prefix = f"{step.number:3}  {settings_words(trial.dials)}: "
    if trial.outcome != "measured":
        return _folded(prefix + f"{trial.outcome}" + (f", {_cut(trial.detail)}" if trial.detail else ""))
    words = prefix + figures_words(trial.figures)
    if trial.disturbed is not None:
        return _folded(f"{words}; discarded: {trial.disturbed}")
    best = step.best
    if best is not None and best.dials != trial.dials:
        words += f" (best {_rate(best.figures)})"
    return _folded(words)


def settings_words(settings: TrialSettings, *, whole: bool = False) -> str:
    """Trial settings as text; `whole` includes those with default values."""
    parts = [number_of(settings.sequences, "seq", "seqs"), number_of(settings.threads, "thread")]
    if settings.threads_batch != settings.threads:
        parts[-1] += f"/{settings.threads_batch}"
    parts.append(f"ubatch {settings.ubatch}")
    if whole:
        parts = [number_of(settings.sequences, "sequence"), number_of(settings.threads, "thread")]
        parts += [
            f"{settings.threads_batch} for prefill",
            f"micro-batch {settings.ubatch}",
            f"context {settings.context:,}",
        ]
    if whole or (settings.cache_type_k, settings.cache_type_v) != ("f16", "f16"):
        types = dict.fromkeys((settings.cache_type_k, settings.cache_type_v))
        parts.append("/".join(types) + (" cache" if whole else ""))
    if not settings.flash_attention:
        parts.append("no flash attention" if whole else "no fa")
    parts += [word for word, off in (("no mmap", not settings.mmap), ("no repack", not settings.repack)) if off]
    if settings.offload_min_batch is not None:
        parts.append(f"offload from {settings.offload_min_batch}")
    return ", ".join(parts)


def figures_words(figures: Figures, *, whole: bool = False) -> str:
    """Figures as text, most important first."""
    parts = []
    if figures.jobs_tok_s is not None:
        parts.append(f"{number_words(figures.jobs_tok_s)} tok/s" + (" in a batch, prompts included" if whole else ""))
    if figures.decode_tok_s is not None and (whole or not parts):
        parts.append(f"{number_words(figures.decode_tok_s)} tok/s decoding")
    if figures.prefill_tok_s is not None and whole:
        parts.append(f"{number_words(figures.prefill_tok_s)} tok/s prefill")
    if figures.first_token_s is not None:
        parts.append(f"first token {short_seconds(figures.first_token_s)}" + (" during a batch" if whole else ""))
    if figures.joules_per_token is not None:
        parts.append(f"{number_words(figures.joules_per_token)} J per token")
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
    return f"jobs of {aim.prompt_tokens} shared + {aim.tail_tokens} own tokens, {aim.output_tokens} generated"


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
    """A figure with three significant digits; empty if it was not measured."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _folded(text: str) -> str:
    return fill(text, _COLUMNS, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False)


def _cut(detail: str) -> str:
    """The beginning of an engine's error detail."""
    return shorten(detail, _DETAIL_CHARS, placeholder=" ...")


def short_seconds(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
