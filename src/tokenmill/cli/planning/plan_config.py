"""`tokenmill plan` without a model: the engines of the configuration together on one machine."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.api.planning.config_plan import plan_config
from tokenmill.cli.output import Common, jsonable, show, show_json
from tokenmill.cli.views.plan import document, shortfalls_of
from tokenmill.config import Config
from tokenmill.errors import DoesNotFit
from tokenmill.launch.tensor_patterns import tiers_by_pattern
from tokenmill.planner.shared_machine import SharedEngine, SharedMachine
from tokenmill.units import GIB


def show_config_plan(config: Config, machine: str | None, common: Common) -> int:
    """Show what the engines of the configuration need together. Exit code 3: more than the machine has."""
    shared = plan_config(config, machine)
    if common.json:
        show_json(_document(shared))
    else:
        show(
            Text.assemble(("machine  ", "bold"), shared.machine.name),
            Text.assemble(("fits     ", "bold"), ("yes", "") if shared.fits else ("NO", "bold red")),
            Text(),
            _engines(shared),
            Text(),
            _memory(shared),
            Text(),
            *(line for engine in shared.engines for line in _alone(engine)),
            *shortfalls_of(shared.shortfalls),
            *_warnings(shared),
        )
    return 0 if shared.fits else DoesNotFit.exit_code


def _engines(shared: SharedMachine) -> Table:
    table = Table("engine", box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("fits alone", "threads", "RAM GB/s", "decode tok/s", "together"):
        table.add_column(column, justify="right")
    for engine in shared.engines:
        table.add_row(
            engine.name,
            engine.plan.profile.name,
            "yes" if engine.plan.fits else "NO",
            str(engine.threads),
            _figure(engine.host_gb_s),
            _figure(engine.decode_tok_s),
            _figure(engine.together_tok_s),
        )
    cores = "unknown" if shared.cores is None else str(shared.cores)
    reads = [engine.host_gb_s for engine in shared.engines if engine.host_gb_s is not None]
    table.add_row("sum", "", "", f"{shared.threads} of {cores}", _figure(sum(reads)), "", "")
    return table


def _alone(engine: SharedEngine) -> list[RenderableType]:
    """What an engine lacks even without the others."""
    if engine.plan.fits:
        return []
    longest = engine.plan.longest_context
    more = "" if longest is None else f"; longest context that fits: {longest:,}"
    return [Text(f"{engine.name} alone{more}:"), *shortfalls_of(engine.plan.shortfalls)]


def _memory(shared: SharedMachine) -> Table:
    table = Table("GiB", box=None, pad_edge=False)
    for column in (*(engine.name for engine in shared.engines), "reserve", "sum", "available"):
        table.add_column(column, justify="right")
    for tier in shared.tiers:
        sizes = (*tier.by_engine.values(), tier.reserve_bytes, tier.needed_bytes, tier.available_bytes)
        table.add_row(tier.name, *(f"{size / GIB:.1f}" for size in sizes))
    return table


def _warnings(shared: SharedMachine) -> list[Text]:
    found = []
    if shared.cores is not None and shared.threads > shared.cores:
        text = f"warning: {shared.threads} threads share {shared.cores} cores; set threads of each engine"
        found.append(Text(text, style="yellow"))
    slowed = [engine for engine in shared.engines if (engine.together_tok_s or 0) < 0.99 * (engine.decode_tok_s or 0)]
    if slowed:
        names = ", ".join(engine.name for engine in slowed)
        text = f"warning: memory bandwidth does not suffice for all engines at the same time: {names} decode slower"
        found.append(Text(text, style="yellow"))
    return found


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _document(shared: SharedMachine) -> dict[str, Any]:
    return {
        "machine": shared.machine.name,
        "fits": shared.fits,
        "cores": shared.cores,
        "threads": shared.threads,
        "engines": [
            {
                "name": engine.name,
                "threads": engine.threads,
                "host_gb_s": engine.host_gb_s,
                "decode_tok_s": engine.decode_tok_s,
                "together_tok_s": engine.together_tok_s,
                "plan": document(engine.plan, tiers_by_pattern(engine.plan.placement, engine.plan.profile), None),
            }
            for engine in shared.engines
        ],
        "tiers": [{**jsonable(tier), "needed_bytes": tier.needed_bytes} for tier in shared.tiers],
        "shortfalls": [{**jsonable(item), "missing_bytes": item.missing_bytes} for item in shared.shortfalls],
    }
