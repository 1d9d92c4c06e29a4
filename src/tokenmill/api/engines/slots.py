"""Fits an engine to a stored batch: its slots, its KV layout, and the `EngineShape` that the worker schedules with."""

from dataclasses import replace

from tokenmill.api.progress import Measuring, OnProgress, ignore, log
from tokenmill.engine.engine import Engine
from tokenmill.jobs.models import Batch
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.scheduler.shape import EngineShape, shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.workload import describe
from tokenmill.tuner import slots
from tokenmill.tuner.point import SlotPoint
from tokenmill.units import number_of


async def fit_slots(
    engine: Engine,
    store: Store,
    batch: Batch,
    *,
    measure: bool,
    adapt_layout: bool,
    on_progress: OnProgress = ignore,
    known: SlotPoint | None = None,
    label: str | None = None,
) -> EngineShape:
    """Configure the engine for the batch and return its shape, with the operating point as `shape.point`.

    `measure`: the number of slots may be measured, because neither the user nor an operating point has set it.
    `adapt_layout`: the KV layout may be changed; only valid if the engine works on this batch alone. `known`:
    `shape.point` of an earlier call on the same engine, whose measured slots are reused. `label` precedes log messages.
    """
    measure = measure and not (known is not None and known.measured)
    workload = await describe(engine, store, batch, measure=measure, adapt_layout=adapt_layout)
    point = await slots.fit(engine, workload, known=known, report=lambda text: on_progress(Measuring(text)))
    prefix = "" if label is None else f"{label}: "
    if measure and point.measured:
        log.info("%s%s: %s", prefix, number_of(point.slots or 1, "slot"), point.slots_reason)
    if point.layout_reason is not None:
        log.info("%s%s", prefix, point.layout_reason)
    unified = engine.runtime is None or engine.runtime.kv_layout != "per_slot"
    shape = shape_of(
        engine.capabilities,
        engine.identity,
        width=point.slots,
        cells_total=(await engine.status()).counters.cells_total if unified else None,
        rates=MeasuredRates(None, point.decode_tok_s),
    )
    return replace(shape, point=point)
