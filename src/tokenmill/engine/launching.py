"""From a plan to an engine that is ready: page cache filled, weights loaded, warmed, and held against the plan.

What was measured on the way goes into the machine's history, from which later forecasts are calibrated.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine import load_history, logs
from tokenmill.engine.engine import Engine
from tokenmill.engine.loading import LoadProgress
from tokenmill.engine.loading_process import read_memory
from tokenmill.engine.loading_vram import this_driver
from tokenmill.engine.page_cache import Filled
from tokenmill.engine.pids import descendants
from tokenmill.engine.pinned_prefixes import Head
from tokenmill.engine.pinned_prefixes import hold as hold_heads
from tokenmill.engine.process import refused
from tokenmill.engine.reconcile import Observed, Reconciliation, observed, reconcile
from tokenmill.engine.records import log_path, slots_path
from tokenmill.engine.start import Slow, start, start_restarting
from tokenmill.engine.warm import WarmProgress, WarmReport, fill_ahead, hold_told, warm
from tokenmill.hardware.host import LocalHost
from tokenmill.planner.plan import Plan

Tell = Callable[[LoadProgress | WarmProgress], None]


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine that is ready, and how it got there."""

    engine: Engine
    load_s: float  # start to first answer possible, without what was read ahead
    filled: Filled | None  # None: nothing was to be read ahead
    warmth: WarmReport | None  # None: neither warming nor heads were asked for
    held: Reconciliation
    refused: tuple[str, ...] = ()  # priority, cores or locks that the kernel did not grant


async def launch_engine(
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
    heads_dir: Path | None = None,
) -> ReadyEngine:
    """Start an engine for a plan and make it ready; one that is not detached is started again when it dies.

    `heads` are held from then on, after a restart too, and kept in `heads_dir` where that is given; a llama.cpp
    server's are kept beside its record.
    """
    say: Tell = tell or (lambda _: None)
    paths = [Path(file.path) for file in plan.profile.files] or [model_path]
    filled = await fill_ahead(plan, paths, progress=say) if config.warm and config.kind != "vllm" else None
    slots = slots_path(state, name)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    engine: Engine
    if detach:
        engine = await start(
            plan, model_path=model_path, config=config, state=state, name=name, progress=say, slow=slow, detach=True
        )
    else:
        engine = await start_restarting(
            plan,
            model_path=model_path,
            config=config,
            state=state,
            name=name,
            progress=say,
            slow=slow,
            again_ready=lambda engine: hold_heads(engine, heads, heads_dir, slots=slots),
        )
    load_s = loop.time() - began_s
    try:
        warmth: WarmReport | None = None
        if config.warm:
            warmth = await warm(
                engine, plan, paths, heads=heads, folder=heads_dir, slots=slots, progress=say, filled=filled
            )
        elif heads:
            done = await hold_told(engine, plan, heads, heads_dir, slots, say)
            warmth = WarmReport(None, None, None, None, done.heads, done.notes)
        held = await asyncio.to_thread(hold, plan, engine, log_path(state, name))
        kept = load_history.record(plan, held, model_id=engine.identity.model_id, load_s=load_s)
        await asyncio.to_thread(load_history.append, state, kept)
    except BaseException:
        await engine.stop()
        raise
    return ReadyEngine(engine, load_s, filled, warmth, held, refused(log_path(state, name)))


def hold(plan: Plan, engine: Engine, log: Path) -> Reconciliation:
    """A running engine's own figures beside the plan's."""
    identity = engine.identity
    pids = () if identity.pid is None else (identity.pid, *descendants(identity.pid))
    memory = read_memory(LocalHost(), pids)
    vram = this_driver()(pids) if plan.placement.gpus else None
    buffers = engine.runtime.buffers if engine.runtime is not None else None
    if buffers is not None:
        return reconcile(
            plan, Observed(buffers, plan.settings.mmap, memory=memory, vram_bytes=vram, build=identity.build)
        )
    said = logs.read(identity.kind, log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    if said is None:
        return reconcile(plan, Observed(memory=memory, vram_bytes=vram, build=identity.build))
    return reconcile(plan, replace(observed(said, memory=memory, vram_bytes=vram), build=identity.build))
