"""What runs on each machine of a cluster: it plans for the machine that it is on, starts an engine, and answers.

Knows nothing of what carries it there. What goes wrong is returned, never raised. Requests and answers are values of
`engine.engine`, so both sides have to be the same version: the outlook says which this one is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Engine,
    Identity,
    KvLayout,
    Prompt,
    Request,
    Runtime,
    Status,
    answer,
)
from tokenmill.engine.launching import ReadyEngine, launch_engine
from tokenmill.engine.loading import LoadProgress
from tokenmill.engine.ray_cluster.faults import Fault, fault_of, told
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.model.identity import identity_of
from tokenmill.planner.plan import Plan
from tokenmill.units import format_bytes
from tokenmill.version import __version__


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
class NodePlan:
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
    runtime: Runtime | None = None


Loading = LoadProgress | WarmProgress


class Bring(Protocol):
    """From a plan to an engine that is ready."""

    async def __call__(
        self,
        plan: Plan,
        *,
        model_path: Path,
        config: EngineConfig,
        state: Path,
        name: str,
        tell: Callable[[Loading], None],
    ) -> ReadyEngine:
        """As `launch_engine`."""


class Host:
    """One engine and its plan."""

    def __init__(self, name: str, prepare: Prepare, *, bring: Bring = launch_engine) -> None:
        """Nothing happens yet; `name` is the engine's among those of its machine."""
        self._name = name
        self._prepare = prepare
        self._bring = bring
        self._prepared: Prepared | None = None
        self._engine: Engine | None = None
        self._load_s = 0.0
        self._loading: Loading | None = None
        self._asked: dict[int, asyncio.Task[Answer]] = {}

    async def outlook(self) -> NodePlan | Fault:
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
            return fault_of(EngineError("the request was cancelled"))
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

    async def set_slots(self, slots: int) -> Facts | Fault:
        """Change the number of slots."""

        async def change() -> Facts:
            await self._up().set_slots(slots)
            return self._facts()

        return await told(change())

    async def set_kv_layout(self, layout: KvLayout) -> Facts | Fault:
        """Change the KV layout."""

        async def change() -> Facts:
            await self._up().set_kv_layout(layout)
            return self._facts()

        return await told(change())

    async def close(self) -> None:
        """End the engine."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()

    async def _plan(self) -> NodePlan:
        if (prepared := self._prepared) is None:
            prepared = self._prepared = await asyncio.to_thread(self._prepare)
        plan = prepared.plan
        lacks = "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)
        model_id = await asyncio.to_thread(identity_of, prepared.model_path)
        return NodePlan(__version__, plan.profile.name, model_id, lacks or None, prepared.tuned, plan.settings.context)

    async def _start(self) -> Facts:
        prepared = self._prepared
        if prepared is None:
            raise AssertionError("an engine is planned before it is started")
        up = await self._bring(
            prepared.plan,
            model_path=prepared.model_path,
            config=prepared.config,
            state=prepared.state,
            name=self._name,
            tell=self._told,
        )
        self._engine = up.engine
        self._load_s = up.load_s
        return self._facts()

    def _told(self, now: Loading) -> None:
        self._loading = now

    def _facts(self) -> Facts:
        engine = self._up()
        return Facts(engine.identity, engine.capabilities, self._load_s, engine.runtime)

    def _up(self) -> Engine:
        if self._engine is None:
            raise EngineDied("the engine was stopped", from_outside=True)
        return self._engine

    def _over(self) -> EngineError | None:
        """Why the engine will not come back; None: it may."""
        engine = self._engine
        return engine.ended.result() if engine is not None and engine.ended.done() else None
