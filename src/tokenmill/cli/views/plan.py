"""How a plan looks: a bar per memory, the speeds, the decisions; and as JSON."""

import shlex
from collections.abc import Iterable
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
    Ledger,
    Plan,
    Settings,
    Shortfall,
    Speed,
    to_buy,
)
from tokenmill.units import GIB, format_bytes, format_gb_s, format_seconds

BAR = 16  # so that a row of large sizes still has 80 columns
SHADES: dict[str, tuple[str, str]] = {
    "weights": ("█", "blue"),
    "kv": ("▓", "green"),
    "compute": ("▒", "yellow"),
    "staging": ("▒", "yellow"),
    "repack": ("▓", "magenta"),
    "prompt_cache": ("▓", "cyan"),
    "runtime": ("▒", "bright_black"),
    "reserve": ("░", "bright_black"),
}


def render(plan: Plan) -> list[RenderableType]:
    """The plan for a person, at 80 columns."""
    parts: list[RenderableType] = [_title(plan), Text(), _tiers(plan), Text()]
    if plan.fits:
        parts += speeds_of(plan.forecast, plan.settings)
    parts += lacks_of(plan.shortfalls)
    for change in plan.changes:
        parts.append(Text(f"  would fit with {change.what}: {change.effect}"))
    if plan.shortfalls and not plan.changes:
        parts.append(Text("  no change of quantisation, context, cache, micro-batch or sequences makes it fit"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return parts


def explained(plan: Plan) -> list[RenderableType]:
    """Every choice with its reason, and what a token's time is made of."""
    parts: list[RenderableType] = [Text(), reasons_of(plan.decisions)]
    for name, speeds in (("decode", plan.forecast.decode), ("prefill", plan.forecast.prefill)):
        if speeds:
            parts += [Text(), terms_of(name, speeds[0]), Text(to_buy(name, speeds[0]) or "")]
    parts += [Text(), _ledger(plan)]
    return parts


def lacks_of(shortfalls: Iterable[Shortfall]) -> list[RenderableType]:
    """What is missing where, and when."""
    parts: list[RenderableType] = []
    for lack in shortfalls:
        when = "while loading" if lack.moment == "load_peak" else "at full context"
        parts.append(
            Text(
                f"does not fit: {lack.tier} lacks {format_bytes(lack.missing_bytes)} {when}"
                f" ({format_bytes(lack.needed_bytes)} of {format_bytes(lack.available_bytes)})",
                style="bold red",
            )
        )
    return parts


def reasons_of(decisions: Iterable[Decision]) -> Table:
    """Every choice with its reason."""
    table = Table("choice", "value", "reason", box=None, pad_edge=False)
    for decision in decisions:
        table.add_row(decision.name, decision.value, decision.reason)
    return table


def _ledger(plan: Plan) -> Table:
    """Every item in every memory at the three moments."""
    table = Table("memory", "item", title="the ledger", title_justify="left", box=None, pad_edge=False)
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
    """A row for each memory; sizes in GiB at full context, and the most that loading takes."""
    table = Table("GiB", "", box=None, pad_edge=False)
    for name in ("weights", "KV", "compute", "other", "free", "of", "loading"):
        table.add_column(name, justify="right")
    for tier in plan.machine.tiers():
        total = plan.ledger.needed(tier.name)
        if not total:
            continue
        bar = _bar(_sizes(plan.ledger, tier), max(tier.capacity_bytes or 0, total))
        table.add_row(tier.name, bar, *columns_of(plan.ledger, tier))
    return table


def _sizes(ledger: Ledger, tier: Tier) -> dict[Item, int]:
    sizes = {item: ledger.of(tier.name, item) for item in ITEMS}
    sizes["weights"] -= sum(row.bytes for row in ledger.page_cache if row.tier == tier.name)
    return sizes


def columns_of(ledger: Ledger, tier: Tier) -> tuple[str, ...]:
    """GiB of weights, KV, compute and other, what is free of how much, and the most that loading takes."""
    sizes = _sizes(ledger, tier)
    room = tier.capacity_bytes or 0
    columns = (
        sizes["weights"] + sizes["repack"],
        sizes["kv"] + sizes["prompt_cache"],
        sizes["compute"] + sizes["staging"],
        sizes["runtime"],
        room - ledger.needed(tier.name) + sizes["reserve"],
        room,
        ledger.needed(tier.name, "load_peak") - sizes["reserve"],
    )
    return tuple(f"{size / GIB:.1f}" for size in columns)


def _bar(sizes: dict[Item, int], room: int) -> Text:
    bar = Text()
    filled = 0
    total = 0
    for item in ITEMS:
        total += sizes.get(item, 0)
        upto = min(BAR, round(BAR * total / room)) if room else 0
        shade, colour = SHADES[item]
        bar.append(shade * (upto - filled), style=colour)
        filled = max(filled, upto)
    return bar.append("·" * (BAR - filled), style="bright_black")


def speeds_of(forecast: Forecast, settings: Settings) -> list[RenderableType]:
    """Decode by depth and by sequences, prefill, the load, and what is to be said of them."""
    parts: list[RenderableType] = []
    for name, speeds in (("decode", forecast.decode), ("prefill", forecast.prefill)):
        alone = [speed for speed in speeds if speed.sequences == 1 and speed.ubatch in (None, settings.ubatch)]
        if alone:
            table = Table(f"{name}, tok/s", title_justify="left", box=None, pad_edge=False)
            for speed in alone:
                table.add_column(f"at {speed.depth}", justify="right")
            table.add_row(alone[0].confidence, *(_rate(speed) for speed in alone))
            parts.append(table)
    together = [speed for speed in forecast.decode if speed.depth == 0]
    if len(together) > 1:
        table = Table("sequences at once", box=None, pad_edge=False)
        for speed in together:
            table.add_column(str(speed.sequences), justify="right")
        table.add_row("decode, all together", *(_rate(speed) for speed in together))
        parts.append(table)
    if forecast.load_cold_s is not None:
        warm = f", {format_seconds(forecast.load_warm_s)} with a warm page cache" if forecast.load_warm_s else ""
        by = f", bound by {forecast.load_bound_by}" if forecast.load_bound_by else ""
        parts.append(Text(f"load {format_seconds(forecast.load_cold_s)}{warm}{by}"))
    parts += [Text(f"note: {note}") for note in forecast.notes]
    return parts


def _rate(speed: Speed) -> str:
    return f"{speed.tok_s:.3g}" if speed.tok_s < 1000 else f"{speed.tok_s:.0f}"


def terms_of(name: str, speed: Speed) -> Table:
    """What the time of one figure is made of, the largest share first."""
    title = f"{name} at depth {speed.depth}: {_rate(speed)} tok/s ({speed.confidence})"
    table = Table("share", title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("ms", "GB", "at"):
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


def what_of(profile: Profile, ledger: Ledger, forecast: Forecast) -> dict[str, Any]:
    """What every plan has as JSON: the model, the ledger at three moments, the forecast."""
    return {
        "model": {
            "name": profile.name,
            "quantisation": profile.quantisation,
            "bytes": profile.bytes,
            "parameters": profile.parameters,
            "active_parameters": profile.active_parameters,
        },
        "ledger": jsonable(ledger.full_context),
        "ledger_after_load": jsonable(ledger.after_load),
        "ledger_at_load_peak": jsonable(ledger.load_peak),
        "page_cache": jsonable(ledger.page_cache),
        "forecast": {
            "decode_tok_s": jsonable(forecast.decode),
            "prefill_tok_s": jsonable(forecast.prefill),
            "load_cold_s": forecast.load_cold_s,
            "load_warm_s": forecast.load_warm_s,
            "load_bound_by": forecast.load_bound_by,
            "notes": list(forecast.notes),
        },
    }


def document(plan: Plan, patterns: list[tuple[str, str]], command: dict[str, Any] | None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        **what_of(plan.profile, plan.ledger, plan.forecast),
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
        "warnings": list(plan.warnings),
    }


def folded(command: Command) -> str:
    """One flag on a line."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in command.env.items()]
    line = ""
    for word in command.argv:
        if word.startswith("-") and line:
            lines.append(f"{line} \\")
            line = "   "
        line = f"{line} {shlex.quote(word)}" if line else shlex.quote(word)
    return "\n".join([*lines, line])
