"""--dry-run of recipes: estimates jobs, tokens, time and cost without starting or storing anything."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.engines.speeds import speeds_for
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.api.tokens import TokenCounter, token_counter
from tokenmill.cli.output import Common, facts, show, show_json
from tokenmill.cli.views.speeds import speed_document, speed_words
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.recipes.estimate import KnownCosts, RecipeForecast, StageForecast, forecast
from tokenmill.recipes.history import Lengths, lengths, settled_lines
from tokenmill.recipes.run import planned_origin
from tokenmill.recipes.runner import AnswerOrigin, Budget, Prospect, StageProspect
from tokenmill.units import format_seconds, number_of

_NO_SPEED = (
    "no speed measured on this machine. Measure its bandwidths (10 s): tokenmill probe --measure -o machine.toml, then "
    "add --machine machine.toml; tokenmill bench measures the model itself"
)
_NO_SPEED_THERE = "the speed of this running engine has not been measured yet"
Tokens = Callable[[str], int] | None
"""Counts the tokens of a text with the model's vocabulary; None if only the engine can read the vocabulary."""


def forecast_shown(
    prospect: Callable[[Tokens, EnginePlan | None], Prospect],
    choice: EngineChoice,
    wanted: EnginePlan | None,
    address: Address,
    budget: Budget,
    called: str,
    common: Common,
) -> None:
    """Print the forecast as text or JSON."""
    config = common.load_config()
    origin = planned_origin(choice, wanted)
    machine = wanted.plan.machine.name if wanted is not None else None
    with ExitStack() as stack:
        tokens = stack.enter_context(
            token_counter(None if choice.path is None else str(choice.path), common.load_config())
        )
        planned = prospect(tokens.count, wanted)
        known_lengths, settled = _seen(address, choice.model_id, planned.stages)
        known = KnownCosts(tokens.count, origin.context, known_lengths, settled, config.costs.per_hour, budget)
        found = forecast(planned, speeds_for(choice, wanted, config.machine), known)
    if common.json:
        show_json(document(found, origin, machine, config.costs.currency))
    else:
        show(*render(found, called, origin, machine, config.costs.currency, budget, tokens, config.costs.per_hour))


def _seen(
    address: Address, model_id: str, stages: Iterable[StageProspect]
) -> tuple[dict[str, Lengths], dict[str, frozenset[int]]]:
    if not has_batches(address):
        return {}, {}
    with StoreReader(address) as reader:
        settled = {stage.stage: settled_lines(reader, model_id, stage.lines) for stage in stages if stage.lines}
        return lengths(reader, model_id, [stage.stage for stage in stages]), settled


# -- text --------------------------------------------------------------------------------------------------------------


def render(
    found: RecipeForecast,
    called: str,
    origin: AnswerOrigin,
    machine: str | None,
    currency: str,
    budget: Budget,
    tokens: TokenCounter,
    per_hour: float | None,
) -> list[RenderableType]:
    """The forecast at 80 columns."""
    rows = {"forecast": f"{called} (dry run: nothing started or stored)"}
    if not found.total.jobs:
        return [facts(rows), "", Text(_nothing(found)), *_remarks(found)]
    if found.rows is not None:
        rows["rows"] = f"{found.rows:,}"
    below = _time(found, own=machine is not None)
    if found.cost is not None and per_hour is not None:
        expected = "" if found.expected_cost is None else f", {found.expected_cost:,.2f} expected"
        below["cost"] = f"at most {found.cost:,.2f} {currency}{expected}, at {per_hour:,.2f} per hour"
    elif per_hour is not None:
        below["cost"] = f"unknown, because the time is; {per_hour:,.2f} {currency} per hour"
    if (runs := _runs(found, budget)) is not None:
        below["runs"] = runs
    below |= _basis(found, tokens)
    below["engine"] = f"{origin.build} with {origin.model}"
    if machine is not None:
        below["machine"] = machine
    return [facts(rows), "", _table(found), "", facts(below), *_remarks(found)]


def _nothing(found: RecipeForecast) -> str:
    return "Nothing to compute" + (": all answers are in the store." if found.total.answered else ".")


def _remarks(found: RecipeForecast) -> list[RenderableType]:
    assumed = found.assumed if found.total.jobs else ()
    return [*(Text(f"assumed: {words}") for words in assumed), *(Text(f"note: {words}") for words in found.notes)]


def _runs(found: RecipeForecast, budget: Budget) -> str | None:
    """The number of runs that the budget divides the recipe into; None without a budget."""
    limits = _limits(budget)
    if found.runs is not None:
        return f"at most {found.runs:,} of {limits} each" if found.runs > 1 else f"one of {limits} is enough"
    if budget.seconds is None:
        return None
    if found.seconds is None:
        return f"unknown: --max-hours {budget.seconds / 3600:g} requires a known speed"
    return f"none: loading alone takes longer than --max-hours {budget.seconds / 3600:g}"


def _table(found: RecipeForecast) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    expected = found.total.expected_output_tokens is not None
    names = ["stage", "jobs", "prompts", "computed", "answers", *(["expected"] if expected else []), "at most"]
    for name in names:
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=name != "stage", overflow="fold")
    stages = [*found.stages, found.total] if len(found.stages) > 1 else found.stages
    for stage in stages:
        cells = [stage.stage, *(f"{number:,}" for number in _numbers(stage))]
        if expected:
            cells.append("" if stage.expected_output_tokens is None else f"{stage.expected_output_tokens:,}")
        table.add_row(*cells, "?" if stage.seconds is None else format_seconds(stage.seconds))
    return table


def _numbers(stage: StageForecast) -> tuple[int, int, int, int]:
    return stage.jobs, stage.prompt_tokens, stage.computed_tokens, stage.output_tokens


def _time(found: RecipeForecast, *, own: bool) -> dict[str, str]:
    """Rows on the time; `own`: the recipe starts the engine, on a known machine."""
    rows = dict[str, str]()
    speeds = found.speeds
    if found.total.answered:
        rows["answered"] = f"{number_of(found.total.answered, 'more job')} in the store, at no cost"
    if found.seconds is None:
        rows["time"] = f"unknown: {_NO_SPEED if own else _NO_SPEED_THERE}"
        return rows
    expected = "" if found.expected_s is None else f", {format_seconds(found.expected_s)} expected"
    load_s = speeds.load_s if speeds is not None and found.total.jobs else None
    load = f"; including {format_seconds(load_s)} of loading" if load_s is not None else "; without loading"
    rows["time"] = f"at most {format_seconds(found.seconds)}{expected}{load}"
    return rows


def _basis(found: RecipeForecast, tokens: TokenCounter) -> dict[str, str]:
    rows = dict[str, str]()
    speeds = found.speeds
    if speeds is not None:
        rows["speed"] = speed_words(speeds)
    size = f"{found.bytes_per_token:.2f} bytes each"
    why = f"; {tokens.why_not}" if tokens.why_not else ""
    rows["tokens"] = f"{size}, counted with the model's vocabulary" if found.counted else f"{size}, estimated{why}"
    rows["tokens"] += "; without the chat template"
    known = {stage.lengths for stage in found.stages if stage.jobs and stage.lengths is not None}
    if len(known) == 1:
        (same,) = known
        of = "the same stage" if same.same_stage else "this model"
        rows["expected"] = f"{same.share:.0%} of the maximum length, as {same.answers:,} answers of {of}"
    elif known:
        rows["expected"] = _by_stage(found.stages)
    return rows


def _by_stage(stages: Iterable[StageForecast]) -> str:
    parts = [
        f"{stage.stage} {stage.lengths.share:.0%} (of {stage.lengths.answers:,} answers)"
        for stage in stages
        if stage.jobs and stage.lengths is not None
    ]
    return f"of the maximum length, as earlier answers: {', '.join(parts)}"


def _limits(budget: Budget) -> str:
    parts = []
    if budget.tokens is not None:
        parts.append(f"{budget.tokens:,} tokens")
    if budget.seconds is not None:
        parts.append(f"{budget.seconds / 3600:g} h")
    return " and ".join(parts)


# -- JSON --------------------------------------------------------------------------------------------------------------


def document(found: RecipeForecast, origin: AnswerOrigin, machine: str | None, currency: str) -> dict[str, Any]:
    """The forecast as JSON."""
    speeds = found.speeds
    return {
        "dry_run": True,
        "rows": found.rows,
        "stages": [_stage_document(stage) for stage in found.stages],
        "total": _stage_document(found.total),
        "seconds_at_most": found.seconds,
        "seconds_expected": found.expected_s,
        "load_seconds": speeds.load_s if speeds is not None else None,
        "cost_at_most": found.cost,
        "cost_expected": found.expected_cost,
        "currency": None if found.cost is None else currency,
        "runs": found.runs,
        "speed": speed_document(speeds),
        "bytes_per_token": round(found.bytes_per_token, 4),
        "tokens_counted": found.counted,
        "assumed": list(found.assumed),
        "notes": list(found.notes),
        "machine": machine,
        "model": origin.model,
        "model_id": origin.model_id,
        "engine": origin.engine,
        "build": origin.build,
        "context": origin.context,
    }


def _stage_document(stage: StageForecast) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "jobs": stage.jobs,
        "answered": stage.answered,
        "prompt_tokens": stage.prompt_tokens,
        "computed_prompt_tokens": stage.computed_tokens,
        "answer_tokens_at_most": stage.output_tokens,
        "answer_tokens_expected": stage.expected_output_tokens,
        "expected_from_answers": None if stage.lengths is None else stage.lengths.answers,
        "seconds_at_most": stage.seconds,
        "seconds_expected": stage.expected_s,
        "assumed": stage.assumed,
    }
