"""Launches the engine of a plan, whatever its kind: native worker or server.

`launch_engine` fills the page cache, loads the weights, warms the engine and compares its memory with the plan; what it
measures goes into the machine's history, from which later forecasts are calibrated. `start` and `start_restarting` only
load; `adopt` finds a detached engine again. Two starts under the same name do not both succeed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine import load_history, logs
from tokenmill.engine.engine import Engine
from tokenmill.engine.loading.process import local_vram, read_memory
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.page_cache import CacheFill
from tokenmill.engine.pinned_prefixes import PinnedPrefix, pin_prefixes
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import descendants
from tokenmill.engine.process.process import Process, refused
from tokenmill.engine.process.registry import log_path, slots_path
from tokenmill.engine.reconcile.reconcile import ObservedMemory, Reconciliation, observed, reconcile
from tokenmill.engine.restart import RestartingEngine
from tokenmill.engine.start import OnLoadProgress, OnSlowLoad, adopt_server, start_server, starting, watch_load
from tokenmill.engine.warm import WarmProgress, WarmReport, fill_ahead, pin_with_progress, warm
from tokenmill.errors import EngineError, UsageError
from tokenmill.hardware.host import LocalHost
from tokenmill.planner.plan import Plan

_LOCK_S = 30.0  # another command may be reading the record of the same name

Tell = Callable[[LoadProgress | WarmProgress], None]


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """A loaded and warmed engine, with the reports of its launch."""

    engine: Engine
    load_s: float  # from the start until it can answer, without reading ahead
    filled: CacheFill | None  # None: nothing was read ahead
    warmth: WarmReport | None  # None: neither warming nor pinned prefixes were requested
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
    slow: OnSlowLoad | None = None,
    detach: bool = False,
    prefixes: Sequence[PinnedPrefix] = (),
    prefixes_dir: Path | None = None,
) -> ReadyEngine:
    """Start an engine for a plan and make it ready; unless detached, it is restarted when it dies.

    `prefixes` are pinned, also after a restart, and saved in `prefixes_dir` if it is given; those of a llama.cpp server
    are saved next to its record.
    """
    report: Tell = tell or (lambda _: None)
    paths = [Path(file.path) for file in plan.profile.files] or [model_path]
    filled = await fill_ahead(plan, paths, progress=report) if config.warm and config.kind != "vllm" else None
    slots = slots_path(state, name)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    engine: Engine
    if detach:
        engine = await start(
            plan, model_path=model_path, config=config, state=state, name=name, progress=report, slow=slow, detach=True
        )
    else:
        engine = await start_restarting(
            plan,
            model_path=model_path,
            config=config,
            state=state,
            name=name,
            progress=report,
            slow=slow,
            again_ready=lambda engine: pin_prefixes(engine, prefixes, prefixes_dir, slots=slots),
        )
    load_s = loop.time() - began_s
    try:
        warmth: WarmReport | None = None
        if config.warm:
            warmth = await warm(
                engine, plan, paths, prefixes=prefixes, folder=prefixes_dir, slots=slots, progress=report, filled=filled
            )
        elif prefixes:
            done = await pin_with_progress(engine, plan, prefixes, prefixes_dir, slots, report)
            warmth = WarmReport(None, None, None, None, done.prefixes, done.notes)
        held = await asyncio.to_thread(hold, plan, engine, log_path(state, name))
        entry = load_history.record(plan, held, model_id=engine.identity.model_id, load_s=load_s)
        await asyncio.to_thread(load_history.append, state, entry)
    except BaseException:
        await engine.stop()
        raise
    return ReadyEngine(engine, load_s, filled, warmth, held, refused(log_path(state, name)))


async def start(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    progress: OnLoadProgress | None = None,
    slow: OnSlowLoad | None = None,
    detach: bool = False,
) -> Engine:
    """Start an engine and wait until it answers; unless detached, it ends with this process."""
    report: OnLoadProgress = progress or (lambda _: None)
    async with registry.locked(state, name, wait_s=_LOCK_S):
        running = registry.read(state, name)
        if running is not None and running.alive:
            raise EngineError(
                f"engine {name} is already running, as process {running.engine.pid} at {running.address}",
                hint="use it, stop it with `tokenmill engines stop`, or choose another name",
            )
        if "://" in config.kind:
            raise UsageError(f"{config.kind} is a running server: connect to it instead of starting it")
        launch = _start_native if config.kind == "native" else start_server
        return await launch(
            plan,
            model_path=model_path,
            config=config,
            state=state,
            name=name,
            progress=report,
            slow=slow,
            detach=detach,
        )


async def _start_native(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    progress: OnLoadProgress,
    slow: OnSlowLoad | None,
    detach: bool,
) -> Engine:
    from tokenmill.native.start import start as start_worker  # noqa: PLC0415 - a server needs none of it

    watching: list[asyncio.Task[None]] = []

    def began(process: Process) -> None:
        watching.extend(watch_load(process, plan, model_path, progress=progress, slow=slow))

    try:
        return await start_worker(
            plan,
            model_path=model_path,
            config=config,
            state=state,
            name=name,
            detach=detach,
            began=began,
            on_note=starting(progress),
        )
    finally:
        for task in watching:
            task.cancel()


async def start_restarting(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    progress: OnLoadProgress | None = None,
    slow: OnSlowLoad | None = None,
    again_ready: Callable[[Engine], Awaitable[object]] | None = None,
) -> RestartingEngine:
    """Start an engine that is restarted when it dies; `again_ready` prepares each process but the first."""

    async def start_again() -> Engine:
        return await start(
            plan, model_path=model_path, config=config, state=state, name=name, progress=progress, slow=slow
        )

    async def restart() -> Engine:
        engine = await start_again()
        try:
            if again_ready is not None:
                await again_ready(engine)
        except BaseException:
            await engine.close()
            raise
        return engine

    return RestartingEngine(await start_again(), restart, most_restarts=config.most_restarts)


async def adopt(state: Path, name: str, *, progress: OnLoadProgress | None = None) -> Engine | None:
    """Connect to a detached engine; None if no engine of that name runs.

    Its pid and start time must be those of the record. An engine that is still loading is waited for.
    """
    async with registry.locked(state, name, wait_s=_LOCK_S):
        record = registry.read(state, name)
        if record is None:
            return None
        if not record.alive:
            registry.forget(state, record)
            return None
        if record.kind == "native":
            from tokenmill.native.client import NativeEngine  # noqa: PLC0415 - a server needs none of it

            return await NativeEngine.connect(Path(record.address))
        return await adopt_server(record, progress=progress)


def hold(plan: Plan, engine: Engine, log: Path) -> Reconciliation:
    """Compare the memory of a running engine with the plan."""
    identity = engine.identity
    pids = () if identity.pid is None else (identity.pid, *descendants(identity.pid))
    memory = read_memory(LocalHost(), pids)
    vram = local_vram()(pids) if plan.placement.gpus else None
    buffers = engine.runtime.buffers if engine.runtime is not None else None
    if buffers is not None:
        return reconcile(
            plan, ObservedMemory(buffers, plan.settings.mmap, memory=memory, vram_bytes=vram, build=identity.build)
        )
    parsed = logs.read(identity.kind, log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    if parsed is None:
        return reconcile(plan, ObservedMemory(memory=memory, vram_bytes=vram, build=identity.build))
    return reconcile(plan, replace(observed(parsed, memory=memory, vram_bytes=vram), build=identity.build))
