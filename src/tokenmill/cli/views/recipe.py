"""The summary of a recipe's run as text and as JSON, the same for every recipe."""

from dataclasses import dataclass
from typing import Any, TypeVar

from tokenmill.recipes.run import RecipeRun
from tokenmill.recipes.runner import Budget, RecipeCost
from tokenmill.units import format_percent, format_seconds, number_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecipeResult(RecipeRun[T]):
    """A recipe that has run, with the exit code of its command."""

    code: int = 0


def summary_rows(result: RecipeResult[Any]) -> dict[str, str]:
    """The rows at the end of a command's summary."""
    spent = result.spent
    origin = result.origin
    rows = {"answers": _answers(spent)}
    if spent.failed:
        rows["failed jobs"] = f"{spent.failed:,}; find the batch with tokenmill status, then tokenmill retry"
    if spent.answers or spent.tokens:
        rows["time"] = f"{format_seconds(result.seconds)}, {format_seconds(spent.seconds)} of it generating"
        cached = spent.cached_tokens / spent.prompt_tokens if spent.prompt_tokens else 0.0
        rows["prompts"] = f"{number_of(spent.prompt_tokens, 'token')}, {format_percent(cached)} from cache"
        rows["generated"] = number_of(spent.completion_tokens, "token")
        if spent.seconds > 0:
            rows["generated"] += f", {spent.completion_tokens / spent.seconds:,.0f} tok/s"
    rows["engine"] = f"{origin.build} with {origin.model}"
    if result.load_s is not None:
        rows["engine"] += f", loaded in {format_seconds(result.load_s)}"
    return rows


def _answers(spent: RecipeCost) -> str:
    earlier = f"{spent.reused:,} from earlier runs" if spent.reused else ""
    if spent.answers:
        return ", ".join(filter(None, (f"{spent.answers:,} computed", earlier)))
    if spent.tokens:  # a limit cancelled the jobs in flight
        return ", ".join(filter(None, ("none finished", earlier)))
    return f"{earlier}, nothing to compute" if earlier else "none"


def spent_document(result: RecipeResult[Any]) -> dict[str, Any]:
    """The summary as JSON: tokens and seconds of this run."""
    spent = result.spent
    origin = result.origin
    return {
        "end": result.end,
        "answers": spent.answers,
        "reused": spent.reused,
        "failed": spent.failed,
        "prompt_tokens": spent.prompt_tokens,
        "reused_tokens": spent.cached_tokens,
        "computed_prompt_tokens": spent.prompt_tokens - spent.cached_tokens,
        "generated_tokens": spent.completion_tokens,
        "seconds": round(result.seconds, 3),
        "work_seconds": round(spent.seconds, 3),
        "load_seconds": None if result.load_s is None else round(result.load_s, 3),
        "model": origin.model,
        "model_id": origin.model_id,
        "engine": origin.engine,
        "build": origin.build,
        "context": origin.context,
    }


def ending(result: RecipeResult[Any], budget: Budget) -> str | None:
    """Why a run ended early and how to continue it; None for a complete run."""
    again = "finished answers are kept; run the same command again to continue"
    if result.end == "finished":
        return None
    if result.end == "cancelled":
        return "a batch of this run was cancelled\nhint: tokenmill retry BATCH --cancelled resumes it"
    if result.end == "stopped":
        return f"stopped: {again}"
    if result.end == "hours":
        limit = f"--max-hours {(budget.seconds or 0.0) / 3600:g} is reached"
    else:
        limit = f"--max-tokens-total {budget.tokens or 0} is reached"
    if not result.spent.answers:
        return f"{limit}, and no answer was finished\nhint: raise the limit"
    return f"{limit}: {again}"
