"""What a person and a program are told of a recipe that has run, the same for every recipe."""

from dataclasses import dataclass
from typing import Any, TypeVar

from tokenmill.recipes.run import RecipeRun
from tokenmill.recipes.runner import Budget, RecipeCost
from tokenmill.units import format_seconds, number_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecipeResult(RecipeRun[T]):
    """A recipe that has run, with the exit code of its command."""

    code: int = 0


def summary_rows(milled: RecipeResult[Any]) -> dict[str, str]:
    """Facts for the end of a command's table."""
    spent = milled.spent
    origin = milled.origin
    rows = {"answers": _answers(spent)}
    if spent.failed:
        rows["without"] = f"{number_of(spent.failed, 'job')}; tokenmill status names the batches, retry tries again"
    if spent.answers or spent.tokens:
        computed = spent.prompt_tokens - spent.cached_tokens
        rows["time"] = f"{format_seconds(milled.seconds)}, {format_seconds(spent.seconds)} of it at work"
        rows["prompts"] = f"{spent.prompt_tokens:,} tokens: {spent.cached_tokens:,} reused, {computed:,} computed"
        rows["written"] = f"{spent.completion_tokens:,} tokens"
        if spent.seconds > 0:
            rows["written"] += f", {spent.completion_tokens / spent.seconds:,.1f} a second"
    rows["engine"] = f"{origin.build} with {origin.model}"
    if milled.load_s is not None:
        rows["engine"] += f", ready after {format_seconds(milled.load_s)}"
    return rows


def _answers(spent: RecipeCost) -> str:
    if not spent.answers and spent.tokens:  # prompts were computed, and what was under way was broken off
        return "none was finished" + (f", {spent.reused:,} were there" if spent.reused else "")
    if not spent.answers:
        return f"{spent.reused:,}, all of which were there: nothing was computed" if spent.reused else "none"
    return f"{spent.answers:,} computed" + (f", {spent.reused:,} were there" if spent.reused else "")


def spent_document(milled: RecipeResult[Any]) -> dict[str, Any]:
    """The same for a program: tokens and seconds of this run."""
    spent = milled.spent
    origin = milled.origin
    return {
        "end": milled.end,
        "answers": spent.answers,
        "reused": spent.reused,
        "failed": spent.failed,
        "prompt_tokens": spent.prompt_tokens,
        "reused_tokens": spent.cached_tokens,
        "computed_prompt_tokens": spent.prompt_tokens - spent.cached_tokens,
        "generated_tokens": spent.completion_tokens,
        "seconds": round(milled.seconds, 3),
        "work_seconds": round(spent.seconds, 3),
        "load_seconds": None if milled.load_s is None else round(milled.load_s, 3),
        "model": origin.model,
        "model_id": origin.model_id,
        "engine": origin.engine,
        "build": origin.build,
        "context": origin.context,
    }


def ending(milled: RecipeResult[Any], budget: Budget) -> str | None:
    """A sentence for a run that is over before it was done; None: it was done."""
    again = "everything answered is kept, and the same command goes on from there"
    if milled.end == "finished":
        return None
    if milled.end == "cancelled":
        return "a batch of this run was cancelled\nhint: tokenmill retry BATCH --cancelled takes it up again"
    if milled.end == "stopped":
        return f"stopped: {again}"
    if milled.end == "hours":
        words = f"the {(budget.seconds or 0.0) / 3600:g} h of --max-hours are over"
    else:
        words = f"the {budget.tokens or 0:,} tokens of --max-tokens-total are used up"
    if not milled.spent.answers:
        return f"{words}, and not one answer was finished\nhint: the limit is too low for these jobs"
    return f"{words}: {again}"
