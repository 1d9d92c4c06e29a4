"""`tokenmill run --dry-run`: the forecast of a batch as text and as JSON."""

import time
from typing import Any

from rich.console import RenderableType

from tokenmill.api.batch_forecast import BatchForecast, DiskSpace, RunForecast
from tokenmill.cli.output import facts, jsonable
from tokenmill.cli.views.run_progress import clock
from tokenmill.cli.views.speeds import speed_document, speed_words
from tokenmill.config import CostsConfig
from tokenmill.units import format_bytes, format_seconds, number_of

_NO_SPEED = "no speed is known; tokenmill probe --measure -o machine.toml, then add --machine machine.toml"
_NO_POWER = "no batch of this model measured it; or set watts in [costs] of the configuration"


def render(found: RunForecast, costs: CostsConfig) -> list[RenderableType]:
    """The forecast at 80 columns."""
    batch = found.batch
    work = batch.work
    how = "counted with the model's vocabulary"
    if batch.lengths.why_estimated is not None:
        how = f"estimated at 4 bytes per token; {batch.lengths.why_estimated}"
    answered = f" ({batch.done:,} more are done)" if batch.done else ""
    rows = {
        "jobs": f"{number_of(batch.jobs, 'job')}{answered} for {found.model}",
        "prompts": f"{number_of(batch.prompt_tokens, 'token')}, {work.prompt_tokens:,.0f} to compute",
        "answers": f"at most {work.output_tokens:,.0f} tokens",
        "time": _time(batch),
    }
    if batch.speeds is not None:
        rows["speed"] = speed_words(batch.speeds)
    energy_j = batch.energy_j
    rows["energy"] = f"unknown: {_NO_POWER}" if energy_j is None else f"{energy_j / 3.6e6:,.3g} kWh (whole machine)"
    cost = _cost(batch, costs)
    if cost is not None:
        rows["cost"] = f"at most {cost:,.2f} {costs.currency}"
    rows |= {label: _space(space) for label, space in _spaces(found).items()}
    if found.plan is not None:
        rows["memory"] = ", ".join(
            f"{name} {format_bytes(tier.used_bytes)}"
            + ("" if tier.capacity_bytes is None else f" of {format_bytes(tier.capacity_bytes)}")
            for name, tier in found.plan.memory.items()
        )
    return [facts(rows | {"lengths": how})]


def _time(batch: BatchForecast) -> str:
    if batch.seconds is None:
        return f"unknown: {_NO_SPEED}"
    now_s = time.time()
    load_s = batch.speeds.load_s if batch.speeds is not None and batch.jobs else None
    load = f", {format_seconds(load_s)} of it for loading" if load_s else ", without loading"
    return f"at most {format_seconds(batch.seconds)}{load}; started now, done at {clock(now_s + batch.seconds, now_s)}"


def _cost(batch: BatchForecast, costs: CostsConfig) -> float | None:
    if costs.per_hour is None or batch.seconds is None:
        return None
    return batch.seconds / 3600 * costs.per_hour


def _spaces(found: RunForecast) -> dict[str, DiskSpace]:
    spaces = {"download": found.download, "disk": found.store}
    return {label: space for label, space in spaces.items() if space is not None}


def _space(space: DiskSpace) -> str:
    needed = format_bytes(space.needed_bytes)
    if space.path is None or space.free_bytes is None:
        return needed
    short = ": not enough" if space.free_bytes < space.needed_bytes else ""
    return f"{needed} in {space.path}, {format_bytes(space.free_bytes)} free{short}"


def document(found: RunForecast, costs: CostsConfig) -> dict[str, Any]:
    """The forecast as JSON."""
    batch = found.batch
    speeds = batch.speeds
    return {
        "dry_run": True,
        "model": found.model,
        "machine": None if found.plan is None else found.plan.machine.name,
        "jobs": batch.jobs,
        "done": batch.done,
        "prompt_tokens": batch.prompt_tokens,
        "computed_prompt_tokens": round(batch.work.prompt_tokens),
        "answer_tokens_at_most": round(batch.work.output_tokens),
        "tokens_counted": batch.lengths.why_estimated is None,
        "seconds_at_most": batch.seconds,
        "load_seconds": None if speeds is None else speeds.load_s,
        "speed": speed_document(speeds),
        "energy_j": batch.energy_j,
        "cost_at_most": _cost(batch, costs),
        "currency": None if costs.per_hour is None else costs.currency,
        "download": jsonable(found.download),
        "store": jsonable(found.store),
        "context": None if found.plan is None else found.plan.settings.context,
    }
