"""The engine of a command: chosen, planned and opened by `tokenmill.api`, with progress on stderr."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tokenmill.api import engines as api
from tokenmill.api.engines import EngineChoice
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning import EnginePlan
from tokenmill.cli.output import Common
from tokenmill.cli.progress import shown_progress
from tokenmill.engine.engine import Engine


def choose(model: str | None, options: EngineOptions, common: Common) -> EngineChoice:
    """`api.choose_engine` with a bar for a download."""
    with shown_progress() as on_progress:
        return api.choose_engine(model, options, common.load_config(), on_progress)


@asynccontextmanager
async def opened(choice: EngineChoice, planned: EnginePlan | None, folder: Path) -> AsyncIterator[Engine]:
    """`api.open_engine` with a bar for the load."""
    async with AsyncExitStack() as stack:
        with shown_progress() as on_progress:
            engine = await stack.enter_async_context(api.open_engine(choice, planned, folder, on_progress))
        yield engine
