"""The engine of a recipe's run: brought up for the first stage that has work, its width measured once, ended with it.

A recipe whose answers are all there loads nothing, and still says who gave them.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill.cli.engine_for import Choice, engine_up
from tokenmill.cli.output import say
from tokenmill.cli.shaping import shape_at, width_for
from tokenmill.cli.starting import Wanted
from tokenmill.engine.engine import Engine
from tokenmill.errors import TokenmillError
from tokenmill.jobs.apart import set_apart
from tokenmill.jobs.job import Batch
from tokenmill.jobs.shape import EngineShape
from tokenmill.jobs.store import Store
from tokenmill.jobs.width import Width
from tokenmill.recipes.here import origin_of
from tokenmill.recipes.mill import Origin

UNKNOWN_BUILD = "not started"


class Crew:
    """As recipes/here.py wants one. Inside `async with`; an engine that is not ours is attached to at once."""

    def __init__(self, store: Store, folder: Path, choice: Choice, wanted: Wanted | None, *, measure: bool) -> None:
        self.load_s: float | None = None  # None: no engine was started
        self._store, self._folder, self._choice, self._wanted, self._measure = store, folder, choice, wanted, measure
        self._engine: Engine | None = None
        self._width: Width | None = None
        self._stack = AsyncExitStack()
        self._planned: Origin | None = None

    async def __aenter__(self) -> Self:
        if self._wanted is None:
            await self._up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def origin(self) -> Origin:
        """As the engine says; before it is up, as it will say."""
        if self._engine is not None:
            return origin_of(self._engine.identity, called=name_of(self._choice, self._engine.identity.model))
        if self._planned is None:
            self._planned = planned_origin(self._choice, self._wanted)
        return self._planned

    async def ready(self, batch: Batch) -> tuple[Engine, EngineShape]:
        """The engine, and how it is to be used: measured with the first stage for which that pays."""
        engine = await self._up()
        if self._measure and self._width is None:
            self._width = await width_for(engine, self._store, batch)
        if self._wanted is not None and (done := await set_apart(engine, self._store, batch)) is not None:
            say(done)
        return engine, await shape_at(engine, self._width)

    async def _up(self) -> Engine:
        if self._engine is None:
            began_s = asyncio.get_running_loop().time()
            engine = await self._stack.enter_async_context(engine_up(self._choice, self._wanted, self._folder))
            if self._wanted is not None:
                self.load_s = asyncio.get_running_loop().time() - began_s
            self._engine = engine
        return self._engine


def planned_origin(choice: Choice, wanted: Wanted | None) -> Origin:
    """Who will answer, told without starting anything."""
    if choice.record is not None:
        record = choice.record
        return Origin(name_of(choice, record.model), record.model_id, record.kind, record.build)
    if wanted is None:
        return Origin(choice.model, choice.model_id, "url", UNKNOWN_BUILD)
    context, name = wanted.plan.settings.context, name_of(choice, wanted.plan.profile.name)
    return Origin(name, choice.model_id, choice.config.kind, build_here(wanted) or UNKNOWN_BUILD, context)


def build_here(wanted: Wanted) -> str | None:
    """The engine's build in its own words; None where only starting it tells."""
    from tokenmill.tune.here import build_of  # noqa: PLC0415  engines, which not every command needs

    try:
        return build_of(wanted.config)
    except TokenmillError:  # not installed, or not one that we know: who starts it says more
        return None


def name_of(choice: Choice, own: str) -> str:
    """The model as people call it; for a file, as it calls itself."""
    return own if choice.url is not None or "/" in choice.model or choice.model.endswith(".gguf") else choice.model
