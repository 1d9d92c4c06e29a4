"""How an engine that is up is to be used for a batch: its width measured where that pays, and shown while it is."""

from contextlib import suppress

from tokenmill.cli.output import say
from tokenmill.cli.run_view import measuring_shown
from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError
from tokenmill.jobs.expected import Rates
from tokenmill.jobs.job import Batch
from tokenmill.jobs.shape import EngineShape, shape_of
from tokenmill.jobs.store import Store
from tokenmill.jobs.width import Width, measured_for


async def width_for(engine: Engine, store: Store, batch: Batch) -> Width | None:
    """The width for a batch, measured where it is worth the time; None: the engine's own."""
    width = None
    with suppress(EngineError), measuring_shown() as tell:  # it is started again; the batch can do without
        width = await measured_for(engine, store, batch, tell=tell)
    if width is not None:
        say(f"{width.value} at once: {width.reason}")
    return width


async def shape_at(engine: Engine, width: Width | None) -> EngineShape:
    """The engine's shape at a width; None: at its own."""
    return shape_of(
        engine.capabilities, engine.identity, width=width.value if width is not None else None,
        cells_total=(await engine.status()).counters.cells_total,
        rates=Rates(None, width.rates) if width is not None else None,
    )  # fmt: skip
