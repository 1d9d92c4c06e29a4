"""Renders a plan as plain text for a Python prompt and as HTML for a notebook. Pure.

The command line has its own, wider view (`cli/views/plan.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from tokenmill.planner.plan import JobTime, Plan
from tokenmill.units import format_bytes, format_seconds, format_tok_s

_COLUMNS = ("memory", "weights", "KV", "compute", "other", "used", "of")


def as_text(plan: Plan) -> str:
    """The plan in at most 80 columns: facts, a table of memories, speeds, suggested changes and warnings."""
    lines = [f"{label:<8} {value}" for label, value in _facts(plan)]
    rows = [_COLUMNS, *_memory(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines.append("")
    lines += ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    lines += ["", *(f"{label:<8} {value}" for label, value in _speeds(plan))]
    lines += list(_changes(plan))
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines).rstrip()


def as_html(plan: Plan) -> str:
    """The same content as HTML tables; every value is escaped."""
    notes = (*_changes(plan), *plan.warnings)
    return "".join(
        (
            '<div class="tokenmill-plan">',
            _html_table(_facts(plan)),
            _html_table(_memory(plan), head=_COLUMNS),
            _html_table(_speeds(plan)),
            *(f"<p>{escape(note)}</p>" for note in notes),
            "</div>",
        )
    )


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    settings = plan.settings
    profile = plan.profile
    quant = f" {profile.quantisation}" if profile.quantisation else ""
    yield "model", f"{profile.name}{quant}, {format_bytes(profile.bytes)}"
    yield "machine", plan.machine.name
    yield (
        "engine",
        f"{settings.engine}, {settings.sequences} x {settings.context} tokens, cache {settings.cache_type_k},"
        f" ubatch {settings.ubatch}, {settings.threads} threads",
    )
    yield "fits", "yes" if plan.fits else f"no: {_missing(plan)}"


def _missing(plan: Plan) -> str:
    return "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)


def _memory(plan: Plan) -> Iterator[tuple[str, ...]]:
    for name, tier in plan.memory.items():
        dropped = sum(row.bytes for row in plan.ledger.page_cache if row.tier == name)
        weights = tier.items.get("weights", 0) - dropped
        shown = [weights, tier.items.get("kv", 0), tier.items.get("compute", 0)]
        size = "unknown" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)
        sizes = [*shown, tier.used_bytes - sum(shown), tier.used_bytes]
        yield (name, *map(format_bytes, sizes), size)


def _speeds(plan: Plan) -> Iterator[tuple[str, str]]:
    forecast = plan.forecast
    if not plan.fits:
        return
    if forecast.decode_tok_s is not None:
        yield "decode", f"{format_tok_s(forecast.decode_tok_s)} tok/s for one sequence (predicted)"
    if plan.batch_tok_s is not None and plan.settings.sequences > 1:
        sequences = plan.settings.sequences
        yield "batch", f"{format_tok_s(plan.batch_tok_s)} tok/s for {sequences} sequences together (predicted)"
    if forecast.prefill_tok_s is not None:
        yield "prefill", f"{format_tok_s(forecast.prefill_tok_s)} tok/s (predicted)"
    if forecast.jobs:
        yield "one job", _job(forecast.jobs[-1])
    if forecast.decode_tok_s is None:
        yield "speed", "unknown; measure the machine with tokenmill probe --measure -o machine.toml"


def _changes(plan: Plan) -> Iterator[str]:
    if plan.longest_context is not None:
        yield f"longest context that fits: {plan.longest_context:,} tokens"
    for change in plan.changes:
        yield f"would fit with {change.what}: {change.effect}"


def _job(job: JobTime) -> str:
    return (
        f"{job.prompt_tokens:,} tokens in {format_seconds(job.prefill_s)},"
        f" {job.answer_tokens} tokens out {format_seconds(job.decode_s)} (predicted)"
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Align the first column left and the others right."""
    yield row[0].ljust(widths[0])
    for cell, width in zip(row[1:], widths[1:], strict=True):
        yield cell.rjust(width)


def _html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    heading = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{heading}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
