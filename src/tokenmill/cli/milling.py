"""What the commands of recipes share: an engine that is brought up when there is work, budgets, signals, the end.

The forecast of --dry-run is in mill_forecast.py, what is printed at the end in mill_view.py. Recipes themselves are
not known here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cyclopts import Parameter

from tokenmill.cli.engine_for import Choice, choose, plan_for
from tokenmill.cli.job_options import folder_beside, store_at
from tokenmill.cli.mill_crew import Crew
from tokenmill.cli.mill_forecast import Tokens, forecast_shown
from tokenmill.cli.mill_pace import keeper
from tokenmill.cli.mill_view import Milled, ending, spent_document, summary_rows
from tokenmill.cli.output import Common, say, show
from tokenmill.cli.plan_view import render
from tokenmill.cli.run_view import jobs_at_first, progress_shown
from tokenmill.cli.starting import KINDS, EngineOptions, Wanted
from tokenmill.cli.stopping import Stop
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.accounts import Tell
from tokenmill.jobs.job import Batch
from tokenmill.jobs.keys import HIGHEST_PRIORITY
from tokenmill.jobs.progress import Report
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import Options
from tokenmill.recipes.here import Here
from tokenmill.recipes.mill import Budget, Mill, Prospect

__all__ = ["Milled", "RecipeOptions", "Tokens", "milled", "spent_document", "summary_rows"]

DOES_NOT_FIT = 3
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


def milled(
    recipe: Callable[[Mill, Callable[[str], None]], Awaitable[T]],
    prospect: Callable[[Tokens], Prospect],
    *,
    called: str,
    model: str | None,
    limits: RecipeOptions,
    options: EngineOptions,
    common: Common,
) -> Milled[T] | int:
    """Run a recipe on the engine that the options choose; an exit code where there is nothing to tell of.

    With --dry-run the forecast is printed instead, and nothing is started or stored. `called`: what batches are said
    to be from. The engine is started with the first stage that has work; after a signal or a used-up budget the recipe
    still ends in its own way, with what there is.
    """
    limits.check()
    address = store_at(limits.store, common)
    choice = choose(model, options, common)
    own = choice.record is None and choice.url is None
    if own:
        options.goal_for(KINDS[choice.config.kind])  # refuses what cannot be, before anything is read
    wanted = plan_for(choice, options, common) if own else None
    if wanted is not None and not wanted.plan.fits:
        show(*render(wanted.plan))
        return DOES_NOT_FIT
    if limits.dry_run:
        forecast_shown(prospect, choice, wanted, address, limits.budget, called, common)
        return 0
    machine = wanted.plan.machine if wanted is not None else _machine_of(choice, common)
    with Store(address) as store, folder_beside(address, common) as folder:
        measure = wanted is not None and options.sequences is None and not wanted.tuned
        ended = asyncio.run(_mill(recipe, store, folder, choice, wanted, machine, limits, called, measure=measure))
    words = ending(ended, limits.budget)
    if words is not None:
        say(words)
    return ended


async def _mill(
    recipe: Callable[[Mill, Callable[[str], None]], Awaitable[T]],
    store: Store,
    folder: Path,
    choice: Choice,
    wanted: Wanted | None,
    machine: Machine | None,
    limits: RecipeOptions,
    called: str,
    *,
    measure: bool,
) -> Milled[T]:
    stop, began_s = Stop(), asyncio.get_running_loop().time()
    stop.loaded()  # loading is broken off by the mill, so that the recipe can write what there is
    async with Crew(store, folder, choice, wanted, measure=measure) as crew:
        mill = Here(
            store, folder, crew, budget=limits.budget, stop=stop.event, options=Options(), priority=limits.priority,
            called=called, watch=_watched, began_s=began_s, alone=wanted is not None,
            booked=keeper(choice.state, machine, lambda: crew.origin) if machine is not None else _unkept,
        )  # fmt: skip
        value = await recipe(mill, say)
        seconds = asyncio.get_running_loop().time() - began_s
        code = stop.code if mill.end == "stopped" else 0
        return Milled(value, mill.end, mill.spent, mill.origin, crew.load_s, seconds, code)


def _machine_of(choice: Choice, common: Common) -> Machine | None:
    """Where an engine runs that was here before; None: behind a URL, who knows where."""
    return None if choice.record is None else find(common.load_config().machine)


def _unkept(_report: Report) -> None:
    """Speeds of who knows what machine tell nothing."""


@contextmanager
def _watched(stage: str, batch: Batch) -> Iterator[Tell]:
    say(f"{stage}: {jobs_at_first(batch.counts)} ({batch.name})")
    with progress_shown() as tell:
        yield tell
