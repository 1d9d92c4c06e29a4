"""A plan over several hosts for a terminal of 80 columns and as JSON."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import jsonable
from tokenmill.cli.views.plan import (
    MEMORY_COLUMNS,
    columns_of,
    common_document,
    decisions_of,
    shortfalls_of,
    speeds_of,
    terms_of,
)
from tokenmill.hardware.fleet import NetworkLink
from tokenmill.planner.multi_host.hosts import HostShare, HostsPlan
from tokenmill.units import format_bytes, format_gb_s


def render(plan: HostsPlan) -> list[RenderableType]:
    """The plan at 80 columns."""
    parts: list[RenderableType] = [_title(plan), Text(), _hosts(plan), Text()]
    if plan.fits:
        parts += speeds_of(plan.forecast, plan.settings)
        if (network := _network_share(plan)) is not None:
            parts.append(Text(network))
    parts += shortfalls_of(plan.shortfalls)
    if plan.shortfalls:
        parts.append(Text("  add a host, or use a shorter --context, a smaller --cache-type or quantization"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return parts


def explained(plan: HostsPlan) -> list[RenderableType]:
    """What --explain adds: every decision with its reason, and the time per token by part."""
    parts: list[RenderableType] = [Text(), decisions_of(plan.decisions)]
    for name, speeds in (("decode", plan.forecast.decode), ("prefill", plan.forecast.prefill)):
        if speeds:
            parts += [Text(), terms_of(name, speeds[0])]
    return parts


def _title(plan: HostsPlan) -> Table:
    settings = plan.settings
    profile = plan.profile
    table = Table.grid(padding=(0, 2))
    quant = f" {profile.quantisation}" if profile.quantisation else ""
    over = f", tensor {settings.tensor_parallel} x pipeline {plan.pipeline_parallel}, on Ray"
    rows = {
        "model": f"{profile.name}{quant}, {format_bytes(profile.bytes)}",
        "hosts": plan.fleet.name,
        "link": _link(plan.fleet.link),
        "engine": f"{settings.engine}{over if settings.engine == 'vllm' else ' with RPC servers'}",
        "context": f"{settings.sequences} x {settings.context} tokens, cache {settings.cache_type_k}",
        "fits": "yes" if plan.fits else "NO",
    }
    for label, value in rows.items():
        table.add_row(Text(label, style="bold"), Text(value, style="bold red" if value == "NO" else ""))
    return table


def _link(link: NetworkLink) -> str:
    return f"{format_gb_s(link.gb_s)} each way, round trip {link.round_trip_s * 1e6:.0f} us"


def _hosts(plan: HostsPlan) -> Table:
    """A row for each host, and one for each of its memories."""
    table = Table("GiB", box=None, pad_edge=False)
    for name in MEMORY_COLUMNS:
        table.add_column(name, justify="right")
    for share in plan.shares:
        role = "head" if share.host == plan.fleet.head else "worker"
        words = f"layers {share.first}-{share.first + share.count - 1}" if share.count else "no layers"
        table.add_row(Text(f"{share.host.name}, {role}", style="bold"), *[""] * 7)
        table.add_row(f"  {words}", *[""] * 7)
        for name, cells in _rows(share):
            table.add_row(f"  {name}", *cells)
    return table


def _rows(share: HostShare) -> list[tuple[str, tuple[str, ...]]]:
    """Names and cells of a host's used memories; consecutive GPUs with equal cells share a row: gpu0-gpu7."""
    used = [tier for tier in share.host.machine.tiers() if share.ledger.needed(tier.name)]
    found: list[tuple[str, tuple[str, ...]]] = []
    for tier in used:
        cells = columns_of(share.ledger, tier)
        if found and tier.kind == "vram" and found[-1][1] == cells:
            found[-1] = (f"{found[-1][0].partition('-')[0]}-{tier.name}", cells)
        else:
            found.append((tier.name, cells))
    return found


def _network_share(plan: HostsPlan) -> str | None:
    """The network's share of the time per token; None without a forecast."""
    shares = []
    for name, speeds in (("decode", plan.forecast.decode), ("prefill", plan.forecast.prefill)):
        if speeds and (total := sum(term.seconds for term in speeds[0].terms)) > 0:
            linked = sum(term.seconds for term in speeds[0].terms if term.name.startswith("link"))
            shares.append(f"{100 * linked / total:.2g} % of {name} time")
    return f"network: {' and '.join(shares)} at depth 0" if shares else None


def _host(plan: HostsPlan, share: HostShare) -> dict[str, Any]:
    return {
        "host": share.host.name,
        "machine": share.host.machine.name,
        "address": share.host.address,
        "role": "head" if share.host == plan.fleet.head else "worker",
        "first_layer": share.first,
        "layers": share.count,
        "threads": share.settings.threads,
        "weights_bytes": share.weights_bytes,
    }


def _tiers(plan: HostsPlan) -> list[dict[str, Any]]:
    return [
        {
            "tier": f"{share.host.name}/{tier.name}",
            "kind": tier.kind,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": share.ledger.total(tier.name),
            "load_peak_bytes": share.ledger.total(tier.name, "load_peak"),
        }
        for share in plan.shares
        for tier in share.host.machine.tiers()
    ]


def document(plan: HostsPlan, patterns: list[tuple[str, str]], commands: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan as JSON: the keys of a plan for one machine, and `hosts`, `link` and `commands`."""
    placement = plan.placement()
    head = next((one for one in commands if one["role"] == "head"), None)
    return {
        **common_document(plan.profile, plan.ledger, plan.forecast),
        "machine": plan.fleet.name,
        "hosts": [_host(plan, share) for share in plan.shares],
        "link": jsonable(plan.fleet.link),
        "fits": plan.fits,
        "settings": {**jsonable(plan.settings), "pipeline_parallel": plan.pipeline_parallel},
        "tiers": _tiers(plan),
        "placement": dict(patterns),
        "devices": {"layers": list(placement.layers), "head": placement.head},
        "command": None if head is None else {name: head[name] for name in ("argv", "env", "notes")},
        "commands": commands,
        "decisions": jsonable(plan.decisions),
        "shortfalls": [{**jsonable(item), "missing_bytes": item.missing_bytes} for item in plan.shortfalls],
        "changes": [],
        "warnings": list(plan.warnings),
    }
