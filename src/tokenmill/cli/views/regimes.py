"""Renders the comparison of resident and streamed batches."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.planner.regimes import BatchProfile, Regime, RegimeOption, Regimes
from tokenmill.units import format_seconds, format_tok_s

MEANING: dict[Regime, str] = {
    "resident": "experts are computed where they are",
    "streamed": "experts in host memory are copied to the GPU in every pass",
}


def render_regimes(regimes: Regimes, *, every: bool) -> list[RenderableType]:
    """The fastest option of each regime, or with `every` all of them, and why one is the best."""
    batch = regimes.batch
    title = (
        f"batch of {batch.jobs:,} jobs: {batch.prefix_tokens:,} shared and {batch.own_tokens:,} own prompt tokens, "
        f"{batch.answer_tokens:,} answer tokens (predicted)"
    )
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in ("regime", "KV layout", "slots", "ubatch", "s a pass", "decode tok/s", "tok/s", "jobs/h", "time"):
        table.add_column(name, justify="left" if name in ("regime", "KV layout") else "right")
    best = regimes.best
    shown = regimes.options if every else [each for each in map(regimes.fastest, MEANING) if each is not None]
    for option in shown:
        table.add_row(*_cells(option, batch), style="bold" if option is best else "")
    lines: list[RenderableType] = [table]
    if best is not None:
        lines.append(Text(f"{best.regime}: {MEANING[best.regime]}; {regimes.reason()}"))
    if regimes.crossing is not None:
        lines.append(Text(f"streaming decodes faster from {regimes.crossing:,} slots"))
    return lines


def _cells(option: RegimeOption, batch: BatchProfile) -> list[str]:
    return [
        option.regime,
        option.layout,
        f"{option.slots:,}",
        f"{option.ubatch:,}",
        f"{option.step_s:.3g}",
        format_tok_s(option.decode_tok_s),
        format_tok_s(option.tok_s(batch)),
        f"{option.jobs_h(batch):,.0f}",
        format_seconds(option.seconds),
    ]


def regimes_document(regimes: Regimes) -> dict[str, Any]:
    """The comparison for JSON."""
    batch = regimes.batch
    best = regimes.best
    return {
        "jobs": batch.jobs,
        "prefix_tokens": batch.prefix_tokens,
        "own_tokens": batch.own_tokens,
        "answer_tokens": batch.answer_tokens,
        "best": None if best is None else _option(best, batch),
        "reason": regimes.reason(),
        "crossing_slots": regimes.crossing,
        "options": [_option(each, batch) for each in regimes.options],
    }


def _option(option: RegimeOption, batch: BatchProfile) -> dict[str, Any]:
    return {
        "regime": option.regime,
        "kv_layout": option.layout,
        "slots": option.slots,
        "ubatch": option.ubatch,
        "cells": option.cells,
        "pass_s": option.step_s,
        "decode_tok_s": option.decode_tok_s,
        "prefill_tok_s": option.prefill_tok_s,
        "batch_tok_s": option.tok_s(batch),
        "jobs_h": option.jobs_h(batch),
        "batch_s": option.seconds,
    }
