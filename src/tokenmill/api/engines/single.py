"""`tokenmill serve --engine-only`: one engine that serves its own HTTP interface, without the gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.api.engines.choose import SlowLoad, name_after
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import EnginePlan, plan_engine
from tokenmill.api.progress import log
from tokenmill.api.tokens import count_digests
from tokenmill.config import Config
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.pinned_prefixes import PinnedPrefix, read_digest
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import EngineError
from tokenmill.native.launching import ReadyEngine, launch_engine


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """A planned engine, ready to be started."""

    name: str
    planned: EnginePlan
    digests: tuple[PinnedPrefix, ...]
    config: Config


def planned_engine(
    model: str, options: EngineOptions, config: Config, *, name: str | None = None, digests: Sequence[Path] = ()
) -> PlannedEngine:
    """Plan an engine and read its digests. Raises DoesNotFit or UsageError if it cannot be started."""
    prefixes = tuple(map(read_digest, digests))
    planned = plan_engine(model, options, config).require_fit()
    return PlannedEngine(
        name or name_after(model, planned), planned, count_digests(prefixes, model, planned, config), config
    )


@asynccontextmanager
async def started(
    engine: PlannedEngine, on_progress: Callable[[LoadProgress | WarmProgress], None], *, detach: bool
) -> AsyncIterator[ReadyEngine]:
    """The engine, ready for requests; it is stopped at the end unless `detach` is set.

    EngineError if it is cancelled while loading.
    """
    try:
        up = await launch_engine(
            engine.planned.plan,
            model_path=engine.planned.model_path,
            config=engine.planned.config,
            state=engine.config.state_path,
            name=engine.name,
            tell=on_progress,
            slow=SlowLoad().report,
            detach=detach,
            prefixes=engine.digests,
            prefixes_dir=engine.config.prefixes_path,
        )
    except asyncio.CancelledError:
        raise EngineError(f"{engine.name} was stopped while it was loading") from None
    try:
        yield up
    finally:
        await up.engine.close()
        if not detach:
            log.info("%s has stopped", engine.name)
