"""Trials on servers, which are told everything when they start: by starting them again, as seldom as can be.

A server with many slots is measured at fewer by using fewer: one start serves every width. Everything else costs a
start, so fewer values of it are tried than on an engine that can be turned.
"""

from dataclasses import replace

from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineDied, EngineError
from tokenmill.planner.plan import Plan
from tokenmill.tuner.engine_rig import Starter, plan_at
from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.predicted import fits
from tokenmill.tuner.space import Space, start_for

_THREADS = (1.0, 0.85, 0.7, 0.5)  # shares of the most that are tried
_UBATCHES = (512, 2048)


class ServerStand:
    """A llama.cpp server, its fork or vLLM."""

    def __init__(self, plan: Plan, starter: Starter, *, most_sequences: int) -> None:
        """`most_sequences`: the widest that any trial will be."""
        self._plan = plan
        self._starter = starter
        self._most = most_sequences
        self._engine: Engine | None = None
        self._started: TrialSettings | None = None

    @property
    def loads(self) -> int:
        """How often it was started."""
        return self._starter.loads

    async def ready(self, dials: TrialSettings) -> Engine:
        """The server that runs if only the width is another, else a new one with as many slots as memory holds."""
        if self._engine is not None and self._started is not None and serves(self._started, dials):
            return self._engine
        await self.close()
        wide = replace(dials, sequences=max(self._most, dials.sequences))
        self._started = wide if fits(self._plan, wide) else dials
        try:
            self._engine = await self._starter.started(plan_at(self._plan, self._started, native=False))
        except EngineError as error:
            if self._started == dials or (isinstance(error, EngineDied) and error.from_outside):
                raise
            self._started = dials  # what is too wide for it need not be too much at these dials
            self._engine = await self._starter.started(plan_at(self._plan, dials, native=False))
        return self._engine

    async def turn(self, dials: TrialSettings) -> None:
        """Nothing is left to be set: the width is how many requests are sent at once."""
        if self._engine is None:
            raise EngineError("no server runs")

    async def lost(self) -> None:
        """End what is left."""
        await self.close()

    async def close(self) -> None:
        """End the server."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()


def serves(started: TrialSettings, dials: TrialSettings) -> bool:
    """Whether a server that was started so can be measured at these dials."""
    return dials.sequences <= started.sequences and replace(dials, sequences=started.sequences) == started


def thinned(plan: Plan, space: Space) -> Space:
    """A space with few values of everything but the width."""
    now = start_for(plan, space)
    most = max(space.threads)
    threads = {max(1, round(most * share)) for share in _THREADS} & set(space.threads)
    return replace(
        space,
        threads=tuple(sorted(threads | {now.threads})),
        threads_batch=(now.threads_batch,) if space.threads_batch else (),
        ubatch=tuple(sorted({now.ubatch, *(set(_UBATCHES) & set(space.ubatch))})),
        cache_types=((now.cache_type_k, now.cache_type_v),),
        flash_attention=(now.flash_attention,),
    )


def most_starts(space: Space) -> int:
    """Starts that trying every combination would take."""
    widths = len(space.sequences)
    return -(-space.all() // widths)
