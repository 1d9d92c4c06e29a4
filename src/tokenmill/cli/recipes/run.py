"""Runs the recipe of a command: options, engine, limits, signals and exit code.

The forecast of --dry-run is in recipe_forecast.py, the summary in views/recipe.py. Nothing here is specific to one
recipe.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from cyclopts import Group, Parameter

from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.api.stores import store_address
from tokenmill.cli.options import EngineFlags, TokenCount
from tokenmill.cli.output import Common, say
from tokenmill.cli.progress import shown_progress
from tokenmill.cli.recipes.forecast import Tokens, forecast_shown
from tokenmill.cli.signals import SignalStop
from tokenmill.cli.views.recipe import RecipeResult, ending, spent_document, summary_rows
from tokenmill.errors import UsageError
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY
from tokenmill.recipes.run import RecipeRequest, run_recipe
from tokenmill.recipes.runner import BatchRunner, Budget, Prospect

__all__ = ["RecipeOptions", "RecipeResult", "Tokens", "run_recipe_command", "spent_document", "summary_rows"]

T = TypeVar("T")


@Parameter(name="*", group=Group.create_ordered("Limits", sort_key=1))
@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """Limits, priority and store of a recipe, and its dry run."""

    dry_run: bool = False
    """Estimate jobs, tokens, time and cost; start and store nothing."""

    max_tokens_total: TokenCount | None = None
    """Stop after N prompt and answer tokens have been computed; the same command resumes, with N more. [default: no
    limit]"""

    max_hours: Annotated[float | None, Parameter(metavar="HOURS")] = None
    """Stop after HOURS, including loading; the same command resumes, with as many more. [default: no limit]"""

    store: Annotated[str | None, Parameter(metavar="STORE")] = None
    """Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
    state folder]"""

    priority: Annotated[int | None, Parameter(metavar="N")] = None
    """Priority of the jobs; higher runs first if batches share an engine. [default: 0, or as before]"""

    def check(self) -> None:
        """UsageError if a value is out of range."""
        if self.max_tokens_total is not None and self.max_tokens_total < 1:
            raise UsageError(f"--max-tokens-total must be at least 1 (got {self.max_tokens_total})")
        if self.max_hours is not None and not 0 < self.max_hours < float("inf"):
            raise UsageError(f"--max-hours must be more than 0 (got {self.max_hours:g})", hint="0.5 is half an hour")
        if self.priority is not None and abs(self.priority) > HIGHEST_PRIORITY:
            raise UsageError(f"--priority must be -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY} (got {self.priority})")

    @property
    def budget(self) -> Budget:
        """The limits of a run."""
        return Budget(self.max_tokens_total, None if self.max_hours is None else self.max_hours * 3600)


def run_recipe_command(
    recipe: Callable[[BatchRunner, Callable[[str], None]], Awaitable[T]],
    prospect: Callable[[Tokens, EnginePlan | None], Prospect],
    *,
    called: str,
    model: str | None,
    limits: RecipeOptions,
    options: EngineFlags,
    common: Common,
) -> RecipeResult[T] | int:
    """Run a recipe on the engine chosen by the options; return its result, or the exit code after --dry-run.

    --dry-run prints the forecast, and starts and stores nothing. `called` is recorded as the source of the batches. The
    engine is started with the first stage that has work. After a signal or at a limit the recipe still writes the
    output it has.
    """
    limits.check()
    config = common.load_config()
    address = store_address(limits.store, config)
    stop = SignalStop()
    with shown_progress() as on_progress:
        choice = choose_engine(model, options, config, on_progress, dry_run=limits.dry_run)
        setup = EngineSetup(choice, options, config).plan()
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
