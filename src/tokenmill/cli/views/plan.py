"""A plan for a terminal of 80 columns and as JSON: memory bars, speeds and decisions."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import jsonable
from tokenmill.hardware.machine import Tier
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import (
    ITEMS,
    Command,
    Decision,
    Forecast,
    Item,
    JobTime,
    Ledger,
    Plan,
    Settings,
    Shortfall,
    Speed,
    upgrade_advice,
)
from tokenmill.units import GIB, format_bytes, format_gb_s, format_seconds

BAR = 16  # characters; a row with large sizes then fits 80 columns
MEMORY_COLUMNS = ("weights", "KV", "compute", "other", "free", "total", "loading")
"""GiB at full context; the last column is the peak while loading."""
SHADES: dict[str, tuple[str, str]] = {
    "weights": ("█", "blue"),
    "repack": ("█", "magenta"),
    "kv": ("▓", "green"),
    "prompt_cache": ("▓", "cyan"),
    "compute": ("▒", "yellow"),
    "draft": ("▒", "yellow"),
    "staging": ("▒", "yellow"),
    "runtime": ("░", "bright_black"),
    "reserve": ("·", "bright_black"),
}
"""The bar's character and colour of each item; the items of one column of the table share a character."""
_LEGEND = {"weights": "weights", "kv": "KV", "compute": "compute", "runtime": "other", "reserve": "free"}


def render(plan: Plan) -> list[RenderableType]:
    """The plan at 80 columns."""
    parts: list[RenderableType] = [_title(plan), Text(), _tiers(plan), _legend(), Text()]
    if plan.fits:
        parts += speeds_of(plan.forecast, plan.settings)
    parts += shortfalls_of(plan.shortfalls)
    if plan.longest_context is not None:
        parts.append(Text(f"  longest context that fits: {plan.longest_context:,} tokens"))
    for change in plan.changes:
        parts.append(Text(f"  would fit with {change.what}: {change.effect}"))
    if plan.shortfalls and not plan.changes:
        parts.append(Text("  no change of quantization, context, cache type, micro-batch or sequences makes it fit"))
    parts += [Text(f"assumed: {guess}") for guess in plan.profile.guesses]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return parts


def explained(plan: Plan) -> list[RenderableType]:
    """What --explain adds: every decision with its reason, the time per token by part, and the memory ledger."""
    parts: list[RenderableType] = [Text(), decisions_of(plan.decisions)]
    for name, speeds in (("decode", plan.forecast.decode), ("prefill", plan.forecast.prefill)):
        if speeds:
            parts += [Text(), terms_of(name, speeds[0]), Text(upgrade_advice(name, speeds[0]) or "")]
    parts += [Text(), _ledger(plan)]
    return parts


def shortfalls_of(shortfalls: Iterable[Shortfall]) -> list[RenderableType]:
    """A line for each memory that is too small."""
    parts: list[RenderableType] = []
    for shortfall in shortfalls:
        when = "while loading" if shortfall.moment == "load_peak" else "at full context"
        what = f"the KV cache on {shortfall.tier}" if shortfall.item == "kv" else shortfall.tier
        parts.append(
            Text(
                f"does not fit: {what} is {format_bytes(shortfall.missing_bytes)} short {when} "
                f"({format_bytes(shortfall.needed_bytes)} needed, {format_bytes(shortfall.available_bytes)} available)",
                style="bold red",
            )
        )
    return parts


def render_versions(plans: Sequence[Plan]) -> list[RenderableType]:
    """The verdicts of versions of an engine that disagree."""
    table = Table("if the engine is", "fits", "", box=None, pad_edge=False)
    for plan in plans:
        lacks = "; ".join(f"{lack.tier} is {format_bytes(lack.missing_bytes)} short" for lack in plan.shortfalls[:2])
        more = ", ..." if len(plan.shortfalls) > 2 else ""
        longest = f"; longest context {plan.longest_context:,}" if plan.longest_context else ""
        table.add_row(plan.settings.engine, "yes" if plan.fits else "NO", f"{lacks}{more}{longest}")
    words = "The command does not tell the version of its engine, and the versions differ. --binary FILE asks yours."
    return [Text(words, style="yellow"), table]


def version_document(plan: Plan) -> dict[str, Any]:
    """The verdict of one version of an engine as JSON."""
    return {
        "engine": plan.settings.engine,
        "fits": plan.fits,
        "shortfalls": [{**jsonable(item), "missing_bytes": item.missing_bytes} for item in plan.shortfalls],
        "longest_context": plan.longest_context,
    }


def decisions_of(decisions: Iterable[Decision]) -> Table:
    """A table of the planner's decisions."""
    table = Table("decision", "value", "reason", box=None, pad_edge=False)
    for decision in decisions:
        table.add_row(decision.name, decision.value, decision.reason)
    return table


def _ledger(plan: Plan) -> Table:
    """The bytes of every item in every memory: while loading, after loading and at full context."""
    table = Table("memory", "item", title="memory ledger", title_justify="left", box=None, pad_edge=False)
    for name in ("while loading", "after loading", "full context"):
        table.add_column(name, justify="right")
    moments = (plan.ledger.load_peak, plan.ledger.after_load, plan.ledger.full_context)
    sizes = [{(row.tier, row.item): row.bytes for row in rows} for rows in moments]
    order = {tier.name: index for index, tier in enumerate(plan.machine.tiers())}
    keys = dict.fromkeys(key for moment in sizes for key in moment)
    for key in sorted(keys, key=lambda key: (order[key[0]], ITEMS.index(key[1]))):
        table.add_row(*key, *(format_bytes(moment.get(key, 0)) for moment in sizes))
    return table


def _title(plan: Plan) -> Table:
    settings = plan.settings
    profile = plan.profile
    table = Table.grid(padding=(0, 2))
    quant = f" {profile.quantisation}" if profile.quantisation else ""
    rows = {
        "model": f"{profile.name}{quant}, {format_bytes(profile.bytes)}",
        "machine": plan.machine.name,
        "engine": f"{settings.engine}, {settings.sequences} x {settings.context} tokens, cache {settings.cache_type_k}"
        + (f"/{settings.cache_type_v}" if settings.cache_type_v != settings.cache_type_k else "")
        + f", ubatch {settings.ubatch}, {settings.threads} threads",
        "fits": "yes" if plan.fits else "NO",
    }
    for label, value in rows.items():
        table.add_row(Text(label, style="bold"), Text(value, style="bold red" if value == "NO" else ""))
    return table


def _tiers(plan: Plan) -> Table:
    """A row for each memory."""
    table = Table("GiB", "", box=None, pad_edge=False)
    for name in MEMORY_COLUMNS:
        table.add_column(name, justify="right")
    for tier in plan.machine.tiers():
        total = plan.ledger.needed(tier.name)
        if not total:
            continue
        bar = _bar(_sizes(plan.ledger, tier), max(tier.capacity_bytes or 0, total))
        table.add_row(tier.name, bar, *columns_of(plan.ledger, tier))
    return table


def _legend() -> Text:
    parts = [Text(f"{SHADES[item][0]} {name}", style=SHADES[item][1]) for item, name in _LEGEND.items()]
    return Text("  ").join(parts)


def _sizes(ledger: Ledger, tier: Tier) -> dict[Item, int]:
    sizes = {item: ledger.of(tier.name, item) for item in ITEMS}
    sizes["weights"] -= sum(row.bytes for row in ledger.page_cache if row.tier == tier.name)
    return sizes


def columns_of(ledger: Ledger, tier: Tier) -> tuple[str, ...]:
    """The cells of `MEMORY_COLUMNS` for a memory."""
    sizes = _sizes(ledger, tier)
    capacity = tier.capacity_bytes or 0
    columns = (
        sizes["weights"] + sizes["repack"],
        sizes["kv"] + sizes["prompt_cache"],
        sizes["compute"] + sizes["draft"] + sizes["staging"],
        sizes["runtime"],
        capacity - ledger.needed(tier.name) + sizes["reserve"],
        capacity,
        ledger.needed(tier.name, "load_peak") - sizes["reserve"],
    )
    return tuple(f"{size / GIB:.1f}" for size in columns)


def _bar(sizes: dict[Item, int], capacity: int) -> Text:
    bar = Text()
    filled = 0
    total = 0
    for item in ITEMS:
        total += sizes.get(item, 0)
        upto = min(BAR, round(BAR * total / capacity)) if capacity else 0
        shade, colour = SHADES[item]
        bar.append(shade * (upto - filled), style=colour)
        filled = max(filled, upto)
    return bar.append("·" * (BAR - filled), style="bright_black")


def speeds_of(forecast: Forecast, settings: Settings) -> list[RenderableType]:
    """Decode and prefill speeds by depth, decode by sequences, the load time, and the forecast's notes."""
    parts: list[RenderableType] = []
    shown = (
        [("decode", forecast.decode)] if forecast.jobs else [("decode", forecast.decode), ("prefill", forecast.prefill)]
    )
    for name, speeds in shown:
        alone = [speed for speed in speeds if speed.sequences == 1 and speed.ubatch in (None, settings.ubatch)]
        if alone:
            title = f"{name} tok/s at depth ({alone[0].confidence}), with the likely range"
            table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
            for speed in alone:
                table.add_column(f"{speed.depth:,}", justify="right")
            table.add_row(*(_with_range(speed) for speed in alone))
            parts.append(table)
    if forecast.jobs:
        parts.append(_jobs(forecast.jobs))
    together = [speed for speed in forecast.decode if speed.depth == 0]
    if len(together) > 1:
        table = Table("concurrent sequences", box=None, pad_edge=False)
        for speed in together:
            table.add_column(str(speed.sequences), justify="right")
        table.add_row("decode tok/s, total", *(_rate(speed) for speed in together))
        if all(speed.low_tok_s is not None for speed in together):
            table.add_row("lowest likely", *(_figure(speed.low_tok_s or 0) for speed in together))
            table.add_row("highest likely", *(_figure(speed.high_tok_s or 0) for speed in together))
        parts.append(table)
    if forecast.load_cold_s is not None:
        warm = f", {format_seconds(forecast.load_warm_s)} with a warm page cache" if forecast.load_warm_s else ""
        by = f"; limited by {forecast.load_bound_by}" if forecast.load_bound_by else ""
        parts.append(Text(f"load time {format_seconds(forecast.load_cold_s)}{warm}{by}"))
    parts += [Text(f"note: {note}") for note in forecast.notes]
    return parts


def _jobs(jobs: Sequence[JobTime]) -> Table:
    """The time of one job, by length of its prompt."""
    table = Table("one job: prompt tokens", box=None, pad_edge=False)
    for job in jobs:
        table.add_column(f"{job.prompt_tokens:,}", justify="right")
    table.add_row("prefill", *(format_seconds(job.prefill_s) for job in jobs))
    table.add_row("prefill tok/s, average", *(_figure(job.prefill_tok_s) for job in jobs))
    table.add_row(f"{jobs[0].answer_tokens} tokens out", *(format_seconds(job.decode_s) for job in jobs))
    return table


def _rate(speed: Speed) -> str:
    return _figure(speed.tok_s)


def _with_range(speed: Speed) -> str:
    """The speed and its range: 12.7 (10.9-14.1)."""
    if speed.low_tok_s is None or speed.high_tok_s is None:
        return _rate(speed)
    return f"{_rate(speed)} ({_figure(speed.low_tok_s)}-{_figure(speed.high_tok_s)})"


def _figure(tok_s: float) -> str:
    return f"{tok_s:.3g}" if tok_s < 1000 else f"{tok_s:.0f}"


def terms_of(name: str, speed: Speed) -> Table:
    """The parts of the time that a predicted speed consists of, largest first."""
    what = f"at depth {speed.depth}" if speed.ubatch is None else f"of {speed.ubatch} tokens after {speed.depth}"
    title = f"{name} {what}: {_rate(speed)} tok/s ({speed.confidence})"
    table = Table("part", title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("ms", "GB", "bandwidth"):
        table.add_column(column, justify="right")
    for term in sorted(speed.terms, key=lambda term: -term.seconds):
        table.add_row(
            term.name,
            f"{term.seconds * 1e3:.2f}",
            "" if term.bytes is None else f"{term.bytes / 1e9:.2f}",
            "" if term.gb_s is None else format_gb_s(term.gb_s),
        )
    return table


def _tier(plan: Plan, tier: Tier) -> dict[str, Any]:
    return {
        "tier": tier.name,
        "kind": tier.kind,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": plan.ledger.total(tier.name),
        "load_peak_bytes": plan.ledger.total(tier.name, "load_peak"),
    }


def common_document(profile: Profile, ledger: Ledger, forecast: Forecast) -> dict[str, Any]:
    """The JSON that plans for one machine and for several hosts share: model, ledgers and forecast."""
    return {
        "model": {
            "name": profile.name,
            "quantisation": profile.quantisation,
            "bytes": profile.bytes,
            "parameters": profile.parameters,
            "active_parameters": profile.active_parameters,
            "guesses": list(profile.guesses),
        },
        "ledger": jsonable(ledger.full_context),
        "ledger_after_load": jsonable(ledger.after_load),
        "ledger_at_load_peak": jsonable(ledger.load_peak),
        "page_cache": jsonable(ledger.page_cache),
        "forecast": {
            "decode_tok_s": jsonable(forecast.decode),
            "prefill_tok_s": jsonable(forecast.prefill),
            "jobs": jsonable(forecast.jobs),
            "load_cold_s": forecast.load_cold_s,
            "load_warm_s": forecast.load_warm_s,
            "load_bound_by": forecast.load_bound_by,
            "notes": list(forecast.notes),
        },
    }


def document(plan: Plan, patterns: list[tuple[str, str]], command: dict[str, Any] | None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        **common_document(plan.profile, plan.ledger, plan.forecast),
        "machine": plan.machine.name,
        "fits": plan.fits,
        "settings": jsonable(plan.settings),
        "tiers": [_tier(plan, tier) for tier in plan.machine.tiers()],
        "placement": dict(patterns),
        "devices": {"layers": list(plan.placement.layers), "head": plan.placement.head},
        "command": command,
        "decisions": jsonable(plan.decisions),
        "shortfalls": [{**jsonable(item), "missing_bytes": item.missing_bytes} for item in plan.shortfalls],
        "changes": jsonable(plan.changes),
        "longest_context": plan.longest_context,
        "warnings": list(plan.warnings),
    }


def folded(command: Command) -> str:
    """The command with one flag per line."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in command.env.items()]
    line = ""
    for word in command.argv:
        if word.startswith("-") and line:
            lines.append(f"{line} \\")
            line = "   "
        line = f"{line} {shlex.quote(word)}" if line else shlex.quote(word)
    return "\n".join([*lines, line])
