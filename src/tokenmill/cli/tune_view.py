"""How a tuning is told: what will be done, each trial on a line, and the point with what it costs."""

from collections.abc import Iterator, Sequence
from textwrap import fill, shorten
from typing import Protocol

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts
from tokenmill.plan.plan import Plan
from tokenmill.tune.drive import Step
from tokenmill.tune.noise import spread
from tokenmill.tune.point import Aim, Dials, Figures, OperatingPoint, Trial
from tokenmill.tune.servers import most_starts
from tokenmill.tune.space import Space
from tokenmill.units import format_bytes, format_seconds, number_of

AROUND_S = 4.0  # that a trial takes beside what it measures: another context, the warm-up, the head
_NAMES = {
    "sequences": "sequences", "threads": "threads", "ubatch": "micro-batch", "threads_batch": "threads for prefill",
    "context": "context", "cache_types": "cache types", "flash_attention": "flash attention", "mmap": "mmap",
    "repack": "repack", "offload_min_batch": "offload threshold", "placement": "placement",
}  # fmt: skip
_AIMS = {
    "throughput": "most tokens of a batch", "latency": "most tokens while the first one of others comes in time",
    "cores": "fewest threads", "context": "most context", "energy": "least energy for a token",
}  # fmt: skip
_FRONT_ROWS = 8
_COLUMNS, _DETAIL_CHARS = 80, 110


class Searching(Protocol):
    """What is asked of a search before it begins."""

    def remaining(self) -> int:
        """Trials to come, about."""

    def loads_needed(self) -> tuple[Dials, ...]:
        """Loads beside the first."""


def announced(
    plan: Plan, aim: Aim, space: Space, search: Searching, known: Sequence[Trial], seconds: float, *, kind: str,
    jobs: int | None = None,
) -> Iterator[str]:  # fmt: skip
    """What will be varied, how many loads that takes, and about how long; `jobs`: so many of the user's own."""
    yield _folded(f"aim: {_aim_words(aim)}; {_work_words(aim, jobs)}")
    dials = [f"{_NAMES[dial]} {_range(space.values(dial))}" for dial in (*space.free, *space.reload)]
    yield _folded(f"varied: {', '.join(dials) or 'nothing'}; {number_of(space.all(), 'combination')}")
    yield from map(_folded, space.reasons)
    trials, load_s = search.remaining(), plan.forecast.load_warm_s or 0.0
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


def progress_line(step: Step) -> str:
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


def outcome_shown(point: OperatingPoint, reason: str) -> list[RenderableType]:
    """The point, what it gives and gives up, and the front."""
    dials, figures = point.dials, point.figures
    rows = {
        "point": dials_words(dials, whole=True),
        "measured": figures_words(figures, whole=True),
        "knee": point.knee,
        "given up": "\n".join(point.given_up) or "nothing that was measured",
        "trials": f"{number_of(len(point.trials), 'trial')}, {number_of(point.loads, 'load')}, "
        f"{format_seconds(point.seconds)}; {reason}",
        "noise": _noise_words(point),
    }
    parts: list[RenderableType] = [facts({label: value for label, value in rows.items() if value})]
    if len(point.front) > 1:
        parts += [Text(), _front(point)]
    return [*parts, Text(), Text("saved; plan, run and serve use it from now on")]


def dials_words(dials: Dials, *, whole: bool = False) -> str:
    """Dials in few words; `whole`: also those that are as usual."""
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
    """Figures in few words, the telling one first."""
    parts = []
    if figures.jobs_tok_s is not None:
        parts.append(f"{_number(figures.jobs_tok_s)} tok/s" + (" of a batch, prompts counted" if whole else ""))
    if figures.decode_tok_s is not None and (whole or not parts):
        parts.append(f"{_number(figures.decode_tok_s)} tok/s decoding")
    if figures.prefill_tok_s is not None and whole:
        parts.append(f"{_number(figures.prefill_tok_s)} tok/s prefill")
    if figures.first_token_s is not None:
        parts.append(f"first token {_short(figures.first_token_s)}" + (" beside a batch" if whole else ""))
    if figures.joules_per_token is not None:
        parts.append(f"{_number(figures.joules_per_token)} J a token")
    for bytes_, where in ((figures.host_bytes, "host"), (figures.gpu_bytes, "GPU")):
        if whole and bytes_ is not None:
            parts.append(f"{format_bytes(bytes_)} {where} memory")
    return ", ".join(parts)


def _front(point: OperatingPoint) -> Table:
    """What nothing else beats in everything; the point itself is marked."""
    table = Table(title="nothing that was measured beats these in everything", title_justify="left", box=None,
                  pad_edge=False)  # fmt: skip
    energy = any(trial.figures.joules_per_token is not None for trial in point.front)
    first = any(trial.figures.first_token_s is not None for trial in point.front)
    columns = ["seqs", "threads", "ubatch", "context", "cache", "batch", "decode", "prefill"]
    for name in (*columns, *(["first"] if first else []), *(["J/token"] if energy else []), ""):
        table.add_column(name, justify="right" if name not in ("cache", "") else "left")
    shown = sorted(point.front, key=lambda trial: -(trial.figures.jobs_tok_s or trial.figures.decode_tok_s or 0.0))
    for trial in shown[:_FRONT_ROWS]:
        dials, figures = trial.dials, trial.figures
        cells = [str(dials.sequences), str(dials.threads), str(dials.ubatch), str(dials.context), dials.cache_type_k]
        cells += [_number(figures.jobs_tok_s), _number(figures.decode_tok_s), _number(figures.prefill_tok_s)]
        if first:
            cells.append("" if figures.first_token_s is None else _short(figures.first_token_s))
        if energy:
            cells.append(_number(figures.joules_per_token))
        table.add_row(*cells, "<" if dials == point.dials else "")
    if len(point.front) > _FRONT_ROWS:
        table.caption = f"and {len(point.front) - _FRONT_ROWS} more: --json has all"
    return table


def _noise_words(point: OperatingPoint) -> str:
    figure = "decode_tok_s" if point.figures.jobs_tok_s is None else "jobs_tok_s"
    if spread(point.trials, figure) is None:
        return f"taken to be {point.noise:.1%}: too little was measured again to tell"
    return f"{point.noise:.1%}: smaller differences mean nothing"


def _aim_words(aim: Aim) -> str:
    words = _AIMS[aim.kind]
    if aim.first_token_s is not None:
        words += f", within {_short(aim.first_token_s)}"
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
    return _number(figures.jobs_tok_s if figures.jobs_tok_s is not None else figures.decode_tok_s) or "?"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _folded(text: str) -> str:
    return fill(text, _COLUMNS, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False)


def _cut(detail: str) -> str:
    """The first words of an engine's last ones: all of them are kept with the trial."""
    return shorten(detail, _DETAIL_CHARS, placeholder=" ...")


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
