"""A soak for a terminal: a line for each step while it runs, then the verdict with all steps; and as JSON."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts, jsonable
from tokenmill.tuner.soak.judge import Limit, SoakResult, SoakStep, named, size


def progress(step: SoakStep, limit: Limit) -> str:
    """A step as one log line."""
    slots = f" in each of {step.sequences} slots" if step.sequences > 1 else ""
    if not step.whole:
        return f"stopped before {step.depth:,} tokens{slots}: memory is running low"
    free = ", ".join(f"{named(r.tier)} {size(r.free_bytes)} free" for r in step.memory if r.free_bytes is not None)
    speed = "" if step.decode_tok_s is None else f" at {_speed(step.decode_tok_s)} tok/s"
    return f"{step.depth:,} of {limit.goal:,} tokens{slots}{speed}" + (f"; {free}" if free else "")


def render(result: SoakResult) -> list[RenderableType]:
    """The result at 80 columns: every step, then the usable context."""
    rows = {
        "model": result.model,
        "machine": result.machine,
        "engine": f"{result.engine}, {result.build}",
        "measured": result.when,
    }
    if result.limit_bytes is not None:
        rows["limit"] = f"{size(result.limit_bytes)} of host memory (--memory-limit)"
    parts: list[RenderableType] = [facts(rows), Text()]
    for sequences in sorted({step.sequences for step in result.steps}):
        parts += [_steps(result, sequences), Text()]
    if any(step.disturbed for step in result.steps):
        parts.append(Text("* the machine was busy: this speed is not added to the history"))
    style = "bold" if result.ended == "goal" else "bold red" if result.ended == "died" else "bold yellow"
    parts.append(Text(f"usable context: {result.usable_context:,} of {result.goal:,}", style=style))
    if result.usable_with_lanes is not None:
        text = f"with {result.lanes} slots full: {result.usable_with_lanes:,} of {result.goal:,} each"
        parts.append(Text(text, style=style))
    parts.append(Text(result.reason))
    if result.last_words:
        parts.append(Text(result.last_words, style="red"))
    return parts


def _steps(result: SoakResult, sequences: int) -> Table:
    """Depth, speeds, and the predicted, measured and free bytes of each memory."""
    steps = [step for step in result.steps if step.sequences == sequences]
    title = "one sequence" if sequences == 1 else f"{sequences} sequences, total speeds"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("depth", "S_PP t/s", "S_TG t/s"):
        table.add_column(column, justify="right")
    table.add_column("memory")
    for column in ("predicted", "measured", "free", "page cache"):
        table.add_column(column, justify="right")
    for step in steps:
        mark = "*" if step.disturbed else ""
        speeds = (_speed(step.prefill_tok_s), _speed(step.decode_tok_s) + mark) if step.whole else ("stopped", "-")
        first = (f"{step.depth:,}", *speeds)
        for reading in step.memory:
            sizes = (reading.predicted_bytes, reading.measured_bytes, reading.free_bytes, reading.page_cache_bytes)
            table.add_row(*first, reading.tier, *map(_size, sizes))
            first = ("", "", "")
        if not step.memory:
            table.add_row(*first, "-", "-", "-", "-", "-")
    return table


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _size(value: int | None) -> str:
    return "-" if value is None else size(value)


def document(result: SoakResult) -> dict[str, Any]:
    """The result as JSON."""
    found: dict[str, Any] = jsonable(result)
    return {**found, "kind": "measured", "reserve_bytes": dict(result.reserve_bytes)}
