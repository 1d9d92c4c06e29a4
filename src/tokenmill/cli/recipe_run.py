"""What the commands of recipes share: an engine that is brought up when there is work, budgets, signals, the end.

The forecast of --dry-run is in recipe_forecast.py, the summary in views/recipe.py. Nothing here is specific to one
recipe.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from cyclopts import Parameter

from tokenmill.api.batch_engine import EngineSetup
from tokenmill.api.engines import choose_engine
from tokenmill.api.stores import store_address
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, say
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.recipe_forecast import Tokens, forecast_shown
from tokenmill.cli.signals import SignalStop
from tokenmill.cli.views.recipe import RecipeResult, ending, spent_document, summary_rows
from tokenmill.errors import UsageError
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY
from tokenmill.recipes.run import RecipeRequest, run_recipe
from tokenmill.recipes.runner import BatchRunner, Budget, Prospect

__all__ = ["RecipeOptions", "RecipeResult", "Tokens", "run_recipe_command", "spent_document", "summary_rows"]

T = TypeVar("T")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """How far a recipe may go, and what it would cost."""

    dry_run: bool = False
    """Say how many jobs, tokens and hours it will take, and what that costs; nothing is started or stored."""

    max_tokens_total: int | None = None
    """Stop when so many tokens have been computed, prompts and answers together; the same command goes on from
    there, with as many again."""

    max_hours: float | None = None
    """Stop after so many hours, loading included; the same command goes on from there, with as many again."""

    store: str | None = None
    """The folder of batches, or postgresql://...; default: store in the configuration, or batches in the state
    folder."""

    priority: int | None = None
    """Of the jobs; higher goes first where batches share an engine; default: 0, or as it was."""

    def check(self) -> None:
        """UsageError where a limit cannot be meant."""
        if self.max_tokens_total is not None and self.max_tokens_total < 1:
            raise UsageError(f"--max-tokens-total must be at least 1, not {self.max_tokens_total}")
        if self.max_hours is not None and not 0 < self.max_hours < float("inf"):
            raise UsageError(f"--max-hours must be more than 0, not {self.max_hours:g}", hint="half an hour is 0.5")
        if self.priority is not None and abs(self.priority) > HIGHEST_PRIORITY:
            raise UsageError(f"--priority must be from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, not {self.priority}")

    @property
    def budget(self) -> Budget:
        """As a mill takes it."""
        return Budget(self.max_tokens_total, None if self.max_hours is None else self.max_hours * 3600)


def run_recipe_command(
    recipe: Callable[[BatchRunner, Callable[[str], None]], Awaitable[T]],
    prospect: Callable[[Tokens], Prospect],
    *,
    called: str,
    model: str | None,
    limits: RecipeOptions,
    options: EngineFlags,
    common: Common,
) -> RecipeResult[T] | int:
    """Run a recipe on the engine that the options choose; an exit code where there is nothing to tell of.

    With --dry-run the forecast is printed instead, and nothing is started or stored. `called`: what batches are said
    to be from. The engine is started with the first stage that has work; after a signal or a used-up budget the recipe
    still ends in its own way, with what there is.
    """
    limits.check()
    config = common.load_config()
    address = store_address(limits.store, config)
    stop = SignalStop()
    with shown_progress() as on_progress:
        setup = EngineSetup(choose_engine(model, options, config, on_progress), options, config).plan()
        if limits.dry_run:
            forecast_shown(prospect, setup.choice, setup.planned, address, limits.budget, called, common)
            return 0
        request = RecipeRequest(called, address, setup, limits.budget, limits.priority)
        run = run_recipe(recipe, request, stop, on_progress)
    code = stop.code if run.end == "stopped" else 0
    ended = RecipeResult(run.value, run.end, run.spent, run.origin, run.load_s, run.seconds, code)
    text = ending(ended, limits.budget)
    if text is not None:
        say(text)
    return ended
