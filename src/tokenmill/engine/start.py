"""Starts server engines, connects to running ones, and reports load progress.

A process that exits while loading raises an error with the end of its log. A cancelled start kills its process. Which
kind of engine to start is decided in `native.launching`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from tokenmill.config import EngineConfig
from tokenmill.engine import logs
from tokenmill.engine.engine import EngineKind
from tokenmill.engine.limits.start import start_limited
from tokenmill.engine.loading.process import local_vram
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.loading.watch import LoadWatch, copied_bytes
from tokenmill.engine.process import registry
from tokenmill.engine.process.exit_status import engine_from_outside
from tokenmill.engine.process.identity import descendants
from tokenmill.engine.process.ports import free_port, holder_of
from tokenmill.engine.process.process import Process
from tokenmill.engine.server.address import base_url, client_for, key_from
from tokenmill.engine.server.client import ServerEngine, log_tail
from tokenmill.engine.server.facts import KnownServer, discover
from tokenmill.engine.server.launch import PreparedServer, prepare
from tokenmill.errors import EngineDied, EngineError
from tokenmill.launch import Finding
from tokenmill.launch.binding import host_bytes
from tokenmill.launch.files.launch import value_of
from tokenmill.model.identity import identity_of
from tokenmill.planner.plan import Plan
from tokenmill.storage.private import private_folder

OnLoadProgress = Callable[[LoadProgress], None]
OnSlowLoad = Callable[[tuple[Finding, ...]], None]
"""Receives the findings of each diagnosis of a slow load; an empty tuple if there are none."""

_FAST_POLL_S, _POLL_S = 0.1, 0.5  # interval of progress reports; small models load within seconds
_FAST_POLL_FOR_S = 5.0
_HEALTH_TIMEOUT_S = 10.0
_DIAGNOSIS_S = 5.0  # interval of diagnoses of a slow load


async def attach(url: str, config: EngineConfig, *, model: str | None = None) -> ServerEngine:
    """Connect to a running server; `model` selects one of several."""
    client = client_for(base_url(url), key_from(config.api_key_env))
    try:
        identity, api = await discover(client, KnownServer(remote_media=config.remote_media), model=model)
    except BaseException:
        await client.aclose()
        raise
    return ServerEngine(client, identity, api)


async def adopt_server(record: registry.Record, *, progress: OnLoadProgress | None = None) -> ServerEngine:
    """Connect to the running server of a record; waits while it is loading."""
    process = Process(
        record.engine, record.supervisor, Path(record.log), predicted_host_bytes=record.predicted_host_bytes
    )
    client = client_for(record.address)
    try:
        watch = LoadWatch(record.engine.pid, (), log=process.log, kind=record.kind)
        await _until_ready(process, client, record.kind, watch, progress or (lambda _: None))
        identity, api = await discover(client, _recorded(record))
    except BaseException:
        process.stop_watching()
        await client.aclose()
        raise
    return ServerEngine(client, identity, api, process=process)


def watch_load(
    process: Process, plan: Plan, model: Path, *, progress: OnLoadProgress, slow: OnSlowLoad | None
) -> list[asyncio.Task[None]]:
    """Report the load progress of a native engine, and why it is slow, until the returned tasks are cancelled."""
    watch = _watch(process, plan, model, "llama-server")  # native engines log as llama.cpp does
    tasks = [asyncio.create_task(_report(watch, progress))]
    if slow is not None:
        tasks.append(asyncio.create_task(_diagnose(watch, plan, slow)))
    return tasks


def starting(progress: OnLoadProgress) -> Callable[[str], None]:
    """Return a function that reports the steps before loading."""
    return lambda detail: progress(LoadProgress("starting", detail=detail))


async def _report(watch: LoadWatch, progress: OnLoadProgress) -> None:
    while True:
        progress(await asyncio.to_thread(watch.sample))
        await asyncio.sleep(_FAST_POLL_S if len(watch.samples) < _FAST_POLL_FOR_S / _FAST_POLL_S else _POLL_S)


async def start_server(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    progress: OnLoadProgress,
    slow: OnSlowLoad | None,
    detach: bool,
) -> ServerEngine:
    """Start a server engine and wait until it answers. The caller must hold the lock of the name."""
    slots = registry.slots_path(state, name)
    private_folder(slots)
    taken = holder_of(config.port) if config.port else None
    port = free_port(config.host, config.port)
    prepared = await asyncio.to_thread(
        prepare, plan, model=model_path, config=config, port=port, name=name, slots=slots.absolute()
    )
    if taken is not None:
        starting(progress)(f"port {config.port} is in use by {taken}: using port {port}")
    model_id = await asyncio.to_thread(identity_of, model_path)
    process = await start_limited(
        prepared.argv,
        plan,
        config,
        state=state,
        name=name,
        env=prepared.env,
        detach=detach,
        contained=prepared.contained,
        cleanup_command=prepared.cleanup_command,
        on_note=starting(progress),
    )
    address = f"http://{config.host}:{port}"
    client = client_for(address)
    record = registry.Record(
        name=name,
        kind=prepared.kind,
        engine=process.pid,
        supervisor=process.supervisor,
        address=address,
        model=plan.profile.name,
        model_id=model_id,
        build=prepared.build or prepared.kind,
        argv=prepared.argv,
        started=time.time(),
        log=str(process.log),
        detached=detach,
        predicted_host_bytes=host_bytes(plan),
    )
    try:
        registry.write(state, record)  # before it is ready, because this process may exit during the load
        watch = _watch(process, plan, model_path, prepared.kind)
        with _diagnosing(watch, plan, slow):
            await _until_ready(process, client, prepared.kind, watch, progress)
        if not prepared.contained:
            _check_port_owner(process, port)
        identity, api = await discover(client, _known(plan, prepared, process, model_id, config))
        registry.write(state, replace(record, model=identity.model, build=identity.build))
    except BaseException:
        await process.kill()
        registry.forget(state, record)
        await client.aclose()
        raise
    return ServerEngine(client, identity, api, process=process, owned=not detach)


def _watch(process: Process, plan: Plan, model: Path, kind: EngineKind) -> LoadWatch:
    files = [Path(file.path) for file in plan.profile.files] if plan.profile.format == "gguf" else [model]
    driver = local_vram() if plan.placement.gpus else None
    return LoadWatch(
        process.pid.pid,
        files,
        log=process.log,
        kind=kind,
        copied_bytes=copied_bytes(plan, vram=driver is not None),
        vram=None if driver is None else lambda pids: sum((driver(pids) or {}).values()) or None,
    )


@contextmanager
def _diagnosing(watch: LoadWatch, plan: Plan, slow: OnSlowLoad | None) -> Iterator[None]:
    """Diagnose the load while the body runs."""
    task = asyncio.create_task(_diagnose(watch, plan, slow)) if slow is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _diagnose(watch: LoadWatch, plan: Plan, slow: OnSlowLoad) -> None:
    while True:
        await asyncio.sleep(_DIAGNOSIS_S)
        slow(watch.findings(plan))


def _known(plan: Plan, prepared: PreparedServer, process: Process, model_id: str, config: EngineConfig) -> KnownServer:
    return KnownServer(
        kind=prepared.kind,
        model_id=model_id,
        build=prepared.build,
        pid=process.pid.pid,
        slots=plan.settings.sequences,
        context=plan.settings.context,
        priorities=prepared.priorities,
        tools=prepared.tools,
        remote_media=config.remote_media,
    )


def _recorded(record: registry.Record) -> KnownServer:
    prepared = PreparedServer(record.kind, record.argv)
    slots = value_of(record.argv, "--max-num-seqs") if record.kind == "vllm" else None
    return KnownServer(
        kind=record.kind,
        model_id=record.model_id,
        pid=record.engine.pid,
        priorities=prepared.priorities,
        tools=prepared.tools,
        build=record.build if record.build != record.kind else None,  # the kind: not known when it was recorded
        slots=int(slots) if slots is not None else None,
    )


async def _until_ready(
    process: Process, client: httpx.AsyncClient, kind: EngineKind, watch: LoadWatch, progress: OnLoadProgress
) -> None:
    """Wait until a server reports that it is ready; EngineError with the end of its log if it exits first."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ended = asyncio.ensure_future(process.wait())
    try:
        while not await _healthy(client):
            progress(await asyncio.to_thread(watch.sample))
            poll_s = _FAST_POLL_S if loop.time() - began_s < _FAST_POLL_FOR_S else _POLL_S
            await asyncio.wait({ended}, timeout=poll_s)
            if ended.done():
                raise failed_start(process, kind)
    finally:
        ended.cancel()
    last = await asyncio.to_thread(watch.sample)
    progress(replace(last, phase="ready", bytes_loaded=last.bytes_total, eta_s=0.0))


def failed_start(process: Process, kind: EngineKind) -> EngineError:
    """The error for a server that exited before it was ready: what killed it, or the cause found in its log."""
    cause = logs.read(kind, "\n".join(process.tail(400))).cause
    end = process.exit
    outside = engine_from_outside(end, kind)
    if cause is None or outside or (end is not None and end.for_memory):
        message = f"while loading, the {kind} engine {process.describe()}"
        return EngineDied(message, hint=log_tail(process), from_outside=outside)
    message = f"while loading, the {kind} engine {process.describe()}: {cause.message}"
    return EngineError(message, hint="\n".join(filter(None, (cause.hint, log_tail(process)))) or None)


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health", timeout=_HEALTH_TIMEOUT_S)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _check_port_owner(process: Process, port: int) -> None:
    """EngineError if another process took the port before the server did."""
    holder = holder_of(port)
    if (
        holder is not None
        and holder.pid is not None
        and holder.pid not in (process.pid.pid, *descendants(process.pid.pid))
    ):
        raise EngineError(f"{holder} took port {port} before the engine", hint="try again, or set engine.port")
