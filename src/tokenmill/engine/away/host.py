"""What runs on each machine of a cluster: it plans for the machine that it is on, starts an engine, and answers.

Knows nothing of what carries it there. What goes wrong is returned, never raised. Requests and answers are values of
`engine.engine`, so both sides have to be the same version: the outlook says which this one is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenmill import __version__
from tokenmill.config import EngineConfig
from tokenmill.engine.away.faults import Fault, fault_of, told
from tokenmill.engine.bring_up import Up, bring_up
from tokenmill.engine.engine import Answer, Capabilities, Engine, Identity, Prompt, Request, Status, answer
from tokenmill.engine.loading import LoadProgress
from tokenmill.engine.native.engine import NativeEngine
from tokenmill.engine.warm import WarmProgress
from tokenmill.engine.watched import Watched
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.model.identity import identity_of
from tokenmill.plan.plan import Plan
from tokenmill.units import format_bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a machine is to run, by its own plan."""

    plan: Plan
    model_path: Path
    config: EngineConfig
    state: Path
    tuned: bool = False  # an operating point is in force


Prepare = Callable[[], Prepared]
"""Plans for the machine that it is called on. Travels there."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a machine says before anything is loaded."""

    version: str  # of tokenmill
    model: str
    model_id: str
    lacks: str | None  # why the model does not fit; None: it does
    tuned: bool
    context: int | None = None  # tokens of one sequence that are planned for


@dataclass(frozen=True, slots=True)
class Facts:
    """An engine that is up."""

    identity: Identity
    capabilities: Capabilities
    load_s: float
    most_lanes: int | None = None  # native only, as what follows
    streams: bool | None = None


Loading = LoadProgress | WarmProgress


class Bring(Protocol):
    """From a plan to an engine that is ready."""

    async def __call__(
        self, plan: Plan, *, model_path: Path, config: EngineConfig, state: Path, name: str,
        tell: Callable[[Loading], None],
    ) -> Up:  # fmt: skip
        """As `bring_up`."""


class Host:
    """One engine and its plan."""

    def __init__(self, name: str, prepare: Prepare, *, bring: Bring = bring_up) -> None:
        """Nothing happens yet; `name` is the engine's among those of its machine."""
        self._name, self._prepare, self._bring = name, prepare, bring
        self._prepared: Prepared | None = None
        self._engine: Engine | None = None
        self._load_s = 0.0
        self._loading: Loading | None = None
        self._asked: dict[int, asyncio.Task[Answer]] = {}

    async def outlook(self) -> Outlook | Fault:
        """Plan; what comes of it."""
        return await told(self._plan())

    async def start(self) -> Facts | Fault:
        """Bring the engine up as planned."""
        return await told(self._start())

    async def loading(self) -> Loading | None:
        """How far the start is; None: it has not begun."""
        return self._loading

    async def ask(self, number: int, request: Request) -> Answer | Fault:
        """The whole answer to a request; the number is for cancelling it."""
        try:
            task = self._asked[number] = asyncio.create_task(answer(self._up(), request))
            return await task
        except TokenmillError as error:
            return fault_of(error, over=isinstance(error, EngineError) and self._over() is not None)
        except asyncio.CancelledError:
            return Fault("EngineError", "nobody waits for this answer any more")
        finally:
            self._asked.pop(number, None)

    async def cancel(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        if (task := self._asked.get(number)) is not None:
            task.cancel()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Fault:
        """The tokens a prompt becomes."""

        async def tokens() -> tuple[int, ...]:
            return await self._up().tokenize(prompt)

        return await told(tokens())

    async def status(self) -> Status | Fault:
        """How the engine is; a fault where it will not come back."""

        async def look() -> Status:
            return await self._up().status()

        over = self._over()
        return await told(look()) if over is None else fault_of(over, over=True)

    async def set_lanes(self, lanes: int) -> Facts | Fault:
        """Change how many sequences run at once; native only."""

        async def change() -> Facts:
            await self._native().set_lanes(lanes)
            return self._facts()

        return await told(change())

    async def set_context(self, streams: bool) -> Facts | Fault:
        """Give each lane cells of its own, or one cache to all; native only."""

        async def change() -> Facts:
            await self._native().set_context(streams=streams)
            return self._facts()

        return await told(change())

    async def close(self) -> None:
        """End the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _plan(self) -> Outlook:
        if (prepared := self._prepared) is None:
            prepared = self._prepared = await asyncio.to_thread(self._prepare)
        plan = prepared.plan
        lacks = "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)
        model_id = await asyncio.to_thread(identity_of, prepared.model_path)
        return Outlook(__version__, plan.profile.name, model_id, lacks or None, prepared.tuned, plan.settings.context)

    async def _start(self) -> Facts:
        prepared = self._prepared
        if prepared is None:
            raise AssertionError("an engine is planned before it is started")
        up = await self._bring(
            prepared.plan, model_path=prepared.model_path, config=prepared.config, state=prepared.state,
            name=self._name, tell=self._told,
        )  # fmt: skip
        self._engine, self._load_s = up.engine, up.load_s
        return self._facts()

    def _told(self, now: Loading) -> None:
        self._loading = now

    def _facts(self) -> Facts:
        engine = self._up()
        living = engine.current if isinstance(engine, Watched) else engine
        native = living if isinstance(living, NativeEngine) else None
        return Facts(
            engine.identity, engine.capabilities, self._load_s, native.most_lanes if native else None,
            native.streams if native else None,
        )  # fmt: skip

    def _up(self) -> Engine:
        if self._engine is None:
            raise EngineDied("the engine was stopped", from_outside=True)
        return self._engine

    def _over(self) -> EngineError | None:
        """Why the engine will not come back; None: it may."""
        engine = self._engine
        return engine.failed.result() if isinstance(engine, Watched) and engine.failed.done() else None

    def _native(self) -> NativeEngine:
        engine = self._up()
        living = engine.current if isinstance(engine, Watched) else engine
        if living is None:
            raise EngineDied("the engine is being started again")
        if not isinstance(living, NativeEngine):
            raise EngineError("this engine cannot be changed while it runs")
        return living
