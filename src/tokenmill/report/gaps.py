"""What a report lacks, each with the command that would tell. Pure."""

import shlex
from collections.abc import Iterator

from tokenmill.report.report import Curve, Gap, Report


def gaps(report: Report, model: str | None, *, files: bool, elsewhere: bool) -> tuple[Gap, ...]:
    """Every section that has less than it could. `files`: the model's are here; `elsewhere`: the machine is not."""
    found = []
    if report.machine.measured is None and not elsewhere:
        found.append(Gap("machine", "no bandwidth was measured yet", "tokenmill probe --measure -o machine.toml"))
    if model is None:
        found.append(Gap("plan", "no model was named, so nothing is planned", "tokenmill report MODEL -o report.html"))
    elif report.plan is None:
        found.append(Gap("plan", "no plan was made: the engine runs already", f"tokenmill plan {shlex.quote(model)}"))
    if model is not None and elsewhere:
        words = f"everything here is predicted: {report.machine.name} is another machine, and this is run there"
        found.append(Gap("point", words, f"tokenmill tune {shlex.quote(model)}"))
    elif model is not None and not files:
        words = "everything here is predicted: the model's files are not on this machine"
        found.append(Gap("point", words, f"tokenmill models pull {shlex.quote(model)}"))
    elif model is not None:
        found += _measured(report, shlex.quote(model))
    if not report.reuse and not elsewhere:
        run = "tokenmill run jobs.jsonl --output results.jsonl"
        command = run if model is None else f"{run} --model {shlex.quote(model)}"
        found.append(Gap("reuse", "no batch has run yet", command))
    return tuple(found)


def _measured(report: Report, model: str) -> Iterator[Gap]:
    if not _has_measured(report.curves, "threads"):
        yield Gap("curves", "no thread curve yet", f"tokenmill tune {model}")
    if not _has_measured(report.curves, "sequences"):
        yield Gap("curves", "no concurrency curve yet", f"tokenmill tune {model}")
    if not any(line.origin.kind == "measured" for curve in report.depth for line in curve.lines):
        yield Gap("depth", "no depth curve measured yet", f"tokenmill bench {model}")
    if report.tiers and all(tier.loaded is None for tier in report.tiers):
        yield Gap("tiers", "the model was not loaded here yet", f"tokenmill serve {model}")
    if not report.comparisons:
        yield Gap("comparisons", "nothing was measured yet to hold the forecast against", f"tokenmill bench {model}")
    if report.point is None:
        yield Gap("point", "no operating point yet", f"tokenmill tune {model}")
    if report.soaked is None:
        yield Gap("soaked", "the context was not filled yet", f"tokenmill soak {model}")
    if report.qualified is None:
        yield Gap("qualified", "the quant was not checked yet", f"tokenmill qualify {model}")


def _has_measured(curves: tuple[Curve, ...], key: str) -> bool:
    return any(line.origin.kind == "measured" for curve in curves if curve.key == key for line in curve.lines)
