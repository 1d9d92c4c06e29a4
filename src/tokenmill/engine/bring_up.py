"""From a plan to an engine that is ready: page cache filled, weights loaded, warmed, and held against the plan.

What was measured on the way goes into the machine's history, from which later forecasts are calibrated.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine import logs, measured
from tokenmill.engine.engine import Engine
from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.loading import LoadProgress
from tokenmill.engine.loading_process import read_memory
from tokenmill.engine.loading_vram import this_driver
from tokenmill.engine.page_cache import Filled
from tokenmill.engine.pids import descendants
from tokenmill.engine.reconcile import Observed, Reconciliation, observed, reconcile
from tokenmill.engine.records import log_path
from tokenmill.engine.start import Slow, start, start_watched
from tokenmill.engine.warm import WarmProgress, WarmReport, fill_ahead, warm
from tokenmill.engine.warm_steps import Head
from tokenmill.engine.watched import Mortal, Watched
from tokenmill.hardware.host import LocalHost
from tokenmill.plan.plan import Plan

Tell = Callable[[LoadProgress | WarmProgress], None]


@dataclass(frozen=True, slots=True)
class Up:
    """An engine that is ready, and how it got there."""

    engine: Mortal | Watched
    load_s: float  # start to first answer possible, without what was read ahead
    filled: Filled | None  # None: nothing was to be read ahead
    warmth: WarmReport | None  # None: not asked for
    held: Reconciliation


async def bring_up(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    tell: Tell | None = None,
    slow: Slow | None = None,
    detach: bool = False,
    heads: Sequence[Head] = (),
) -> Up:
    """Start an engine for a plan and make it ready; one that is not detached is started again when it dies."""
    say: Tell = tell or (lambda _: None)
    paths = [Path(file.path) for file in plan.profile.files] or [model_path]
    filled = await fill_ahead(plan, paths, progress=say) if config.warm and config.kind != "vllm" else None
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    engine: Mortal | Watched
    if detach:
        engine = await start(
            plan, model_path=model_path, config=config, state=state, name=name, progress=say, slow=slow, detach=True
        )
    else:
        engine = await start_watched(
            plan, model_path=model_path, config=config, state=state, name=name, progress=say, slow=slow
        )  # fmt: skip
    load_s = loop.time() - began_s
    try:
        warmth = await warm(engine, plan, paths, heads=heads, progress=say, filled=filled) if config.warm else None
        held = await asyncio.to_thread(hold, plan, engine, log_path(state, name))
        kept = measured.record(plan, held, model_id=engine.identity.model_id, load_s=load_s)
        await asyncio.to_thread(measured.append, state, kept)
    except BaseException:
        await engine.close()
        raise
    return Up(engine, load_s, filled, warmth, held)


def hold(plan: Plan, engine: Engine, log: Path) -> Reconciliation:
    """A running engine's own figures beside the plan's."""
    identity = engine.identity
    pids = () if identity.pid is None else (identity.pid, *descendants(identity.pid))
    memory = read_memory(LocalHost(), pids)
    vram = this_driver()(pids) if plan.placement.gpus else None
    buffers = _own_buffers(engine)
    if buffers is not None:
        return reconcile(
            plan, Observed(buffers, plan.settings.mmap, memory=memory, vram_bytes=vram, build=identity.build)
        )
    said = logs.read(identity.kind, log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    if said is None:
        return reconcile(plan, Observed(memory=memory, vram_bytes=vram, build=identity.build))
    return reconcile(plan, replace(observed(said, memory=memory, vram_bytes=vram), build=identity.build))


def _own_buffers(engine: Engine) -> tuple[Buffer, ...] | None:
    """What a native engine says it took."""
    from tokenmill.engine.native.engine import NativeEngine  # noqa: PLC0415  its packages are an extra

    living = engine.current if isinstance(engine, Watched) else engine
    if not isinstance(living, NativeEngine):
        return None
    return living.hello.buffers
