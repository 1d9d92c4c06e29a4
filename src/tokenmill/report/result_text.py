"""Sentences and table rows about measurements, for both templates. Pure; plain text, not escaped."""

from collections.abc import Iterator, Sequence

from tokenmill.report.compare import typical_error
from tokenmill.report.curves import throughput
from tokenmill.report.report import (
    BatchReuse,
    ChartCurve,
    FigureComparison,
    Qualified,
    ReportPage,
    Series,
)
from tokenmill.report.svg import figure_text, tick_text
from tokenmill.tuner.point import Figures, OperatingPoint, TrialSettings
from tokenmill.units import format_bytes, format_seconds, number_of

REUSE_HEAD = ("batch", "jobs", "computed answers", "reused answers", "generated tokens", "finish reasons")
FRONT_HEAD = ("threads", "sequences", "ubatch", "context", "tok/s", "first token, s", "J/token", "")
Rows = list[tuple[str, str]]


def curve_caption(curve: ChartCurve) -> str:
    """The origins of a chart's lines, and the settings that they share."""
    names: dict[str, list[str]] = {}
    for line in curve.lines:
        names.setdefault(line.origin.words, []).append(line.name)
    origins = [
        words if len(curve.lines) == 1 or words.startswith(of[0]) else f"{' and '.join(of)}: {words}"
        for words, of in names.items()
    ]
    return "; ".join([*origins, *([f"at {curve.note}"] if curve.note else [])])


def curve_table(curve: ChartCurve) -> tuple[list[str], list[list[str]]]:
    """The figures of a chart: column names and rows."""
    xs = sorted({dot.x for line in curve.lines for dot in line.dots})
    names = [line.name if line.name == line.origin.kind else f"{line.name}, {line.origin.kind}" for line in curve.lines]
    rows = [[tick_text(x), *(figure_text(dot.y) if (dot := line.at(x)) else "" for line in curve.lines)] for x in xs]
    return [curve.x_name, *(f"{name}, {curve.unit}" for name in names)], rows


def line_words(curve: ChartCurve, line: Series) -> str:
    """The meaning and the origin of one line of a chart."""
    name = "" if line.name == line.origin.kind else f"{line.name}, "
    return f"{name}{curve.unit} by {curve.x_name}; {line.origin.words}"


def settings_rows(settings: TrialSettings) -> Rows:
    """An operating point's settings."""
    rows = [
        ("threads", f"{settings.threads} for decode, {settings.threads_batch} for prefill"),
        ("concurrent sequences", str(settings.sequences)),
        ("context", f"{settings.context:,} tokens per sequence"),
        ("micro-batch", f"{settings.ubatch} tokens"),
        (
            "cache",
            f"K {settings.cache_type_k}, V {settings.cache_type_v}, "
            f"flash attention {'on' if settings.flash_attention else 'off'}",
        ),
        ("loading", f"mmap {'on' if settings.mmap else 'off'}, repack {'on' if settings.repack else 'off'}"),
    ]
    if settings.offload_min_batch is not None:
        rows.append(("offload", f"prefill on the GPU from {settings.offload_min_batch} rows"))
    return rows


def figure_rows(figures: Figures) -> Rows:
    """The measurements of an operating point."""
    speeds = (
        ("decode, all sequences", figures.decode_tok_s),
        ("prefill", figures.prefill_tok_s),
        ("jobs, including prefill", figures.jobs_tok_s),
    )
    rows = [(name, f"{figure_text(value)} tok/s") for name, value in speeds if value is not None]
    if figures.first_token_s is not None:
        rows.append(("time to first token during a batch", f"{figures.first_token_s:.2f} s"))
    if figures.joules_per_token is not None:
        rows.append(("energy", f"{figures.joules_per_token:.2f} J per token"))
    sizes = (("host memory", figures.host_bytes), ("GPU memory", figures.gpu_bytes))
    return rows + [(name, format_bytes(size)) for name, size in sizes if size]


def point_words(point: OperatingPoint) -> str:
    """The machine, build and date of an operating point, and the trials that found it."""
    return (
        f"{_measured(point)}; aim: {point.aim.kind}; {number_of(len(point.trials), 'trial')}, "
        f"{number_of(point.loads, 'load')}, noise {100 * point.noise:.1f} %"
    )


def front_rows(point: OperatingPoint) -> list[tuple[str, ...]]:
    """The Pareto front: settings with their figures."""
    shown: list[tuple[str, ...]] = []
    for trial in point.front:
        found = throughput(trial.figures)
        settings = trial.dials
        figures = trial.figures
        shown.append(
            (
                str(settings.threads),
                str(settings.sequences),
                str(settings.ubatch),
                f"{settings.context:,}",
                figure_text(found[1]) if found else "",
                "" if figures.first_token_s is None else f"{figures.first_token_s:.2f}",
                "" if figures.joules_per_token is None else f"{figures.joules_per_token:.2f}",
                "chosen" if settings == point.dials else "",
            )
        )
    return shown


def amount(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "bytes":
        return format_bytes(round(value))
    return format_seconds(value) if unit == "s" else f"{figure_text(value)} {unit}"


def error_text(error: float | None) -> str:
    """Such as `+3.1 %` for a prediction that was too high."""
    return "" if error is None else f"{100 * error:+.1f} %"


def reuse_rows(report: ReportPage) -> list[tuple[str, ...]]:
    """The source and the counts of each batch."""
    return [
        (
            each.source,
            *(f"{count:,}" for count in (each.jobs, each.answers, each.answers_reused, each.written_tokens)),
            _finish_reasons(each),
        )
        for each in report.reuse
    ]


def cut_answers(report: ReportPage) -> list[tuple[str, str]]:
    """For each batch with incomplete answers, a sentence and the command that lists them."""
    return [
        (
            f"{each.source}: {number_of(each.cut, 'answer')} reached max_tokens or the end of the context",
            f"tokenmill results {each.name} --cut",
        )
        for each in report.reuse
        if each.cut
    ]


def check_rows(qualified: Qualified) -> list[tuple[str, ...]]:
    """Each check: score, required score, verdict and remark."""
    verdicts = {True: "pass", False: "fail", None: "reported"}
    return [
        (
            check.name,
            *("" if score is None else figure_text(score) for score in (check.score, check.threshold)),
            verdicts[check.good],
            check.words or "",
        )
        for check in qualified.checks
    ]


def headline(report: ReportPage) -> Iterator[tuple[str, str, str]]:
    """The figures at the top: name, value and origin."""
    plan = report.plan
    point = report.point
    if plan is not None:
        words = "predicted, with reserves" if plan.fits else "predicted; see the changes that would make it fit"
        yield "fits", "yes" if plan.fits else "no", words
    if point is not None and (found := throughput(point.figures)) is not None:
        yield (
            f"{found[0]}, {number_of(point.dials.sequences, 'sequence')}",
            f"{figure_text(found[1])} tok/s",
            _measured(point),
        )
    measured = _alone(report, "decode-depth")
    if measured is not None:
        yield "decode, one sequence", f"{figure_text(measured[0])} tok/s", measured[1]
    elif plan is not None and plan.decode_tok_s is not None:
        yield "decode, one sequence", f"{figure_text(plan.decode_tok_s)} tok/s", f"predicted, {plan.confidence}"
    prefill = _alone(report, "prefill-depth")
    if prefill is not None:
        yield "prefill", f"{figure_text(prefill[0])} tok/s", prefill[1]
    elif plan is not None and plan.prefill_tok_s is not None:
        yield "prefill", f"{figure_text(plan.prefill_tok_s)} tok/s", f"predicted, {plan.confidence}"
    if report.soaked is not None and report.soaked.usable_context is not None:
        yield "usable context", f"{report.soaked.usable_context:,}", report.soaked.origin.words
    computed = sum(batch.computed_tokens for batch in report.reuse)
    reused = sum(batch.reused_tokens for batch in report.reuse)
    if computed + reused:
        words = f"measured by the engines in {number_of(len(report.reuse), 'batch', 'batches')}"
        yield "prompt tokens reused", f"{100 * reused / (computed + reused):.0f} %", words
    error = typical_error(speeds_of(report.comparisons))
    if error is not None:
        count = len(speeds_of(report.comparisons))
        yield "error of predicted speeds", f"{100 * error:.0f} %", f"median of {number_of(count, 'measurement')}"


def speeds_of(found: Sequence[FigureComparison]) -> list[FigureComparison]:
    """The comparisons of speeds."""
    return [each for each in found if each.unit == "tok/s"]


def comparison_rows(report: ReportPage) -> list[tuple[str, ...]]:
    """Each comparison as text."""
    return [
        (
            each.what,
            each.at,
            amount(each.predicted, each.unit),
            amount(each.measured, each.unit),
            error_text(each.error),
            measured_with(each),
        )
        for each in report.comparisons
    ]


def measured_with(each: FigureComparison) -> str:
    """The machine, build and date of a measurement."""
    return each.origin.words.removeprefix("measured on ")


def in_common(found: Sequence[FigureComparison]) -> tuple[str, str, bool]:
    """The caption of a table, the settings that all its rows share, and whether its rows have different origins."""
    origins = sorted({each.origin.words for each in found})
    parts = [each.at.split(", ") for each in found]
    shared = ", ".join(part for part in parts[0] if all(part in each for each in parts))
    above = [*(origins if len(origins) == 1 else ()), *([f"at {shared}"] if shared else ())]
    return "; ".join(above), shared, len(origins) > 1


def without(words: str, shared: str) -> str:
    """Settings as text, without the shared ones."""
    common = set(shared.split(", "))
    return ", ".join(part for part in words.split(", ") if part not in common)


def _finish_reasons(batch: BatchReuse) -> str:
    if batch.finish_reasons is None:
        return "not counted"
    ordered = sorted(batch.finish_reasons.items(), key=lambda reason: -reason[1])
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _measured(point: OperatingPoint) -> str:
    return f"measured on {point.place.machine}, {point.place.build}, {point.when[:10]}"


def _alone(report: ReportPage, key: str) -> tuple[float, str] | None:
    """The shallowest measured figure of a depth curve."""
    lines = [line for curve in report.depth if curve.key == key for line in curve.lines]
    line = next((line for line in lines if line.origin.kind == "measured" and line.dots), None)
    if line is None:
        return None
    return line.dots[0].y, f"{line.origin.words}, at depth {line.dots[0].x:g}"
