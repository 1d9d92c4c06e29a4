"""Starts an engine process with its limits, which are stored next to its record (reserve.json)."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.cgroup import memory_limit_of
from tokenmill.engine.limits.reserve import AppliedLimits, prepare_limits, restrict_to_cpus, verified
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.process.process import Process
from tokenmill.launch.binding import host_bytes
from tokenmill.planner.plan import Plan
from tokenmill.storage.atomic import replace_file

OnNote = Callable[[str], None]
_SCOPE_TIMEOUT_S, _POLL_S = 20.0, 0.02  # systemd creates a scope around the running process


async def start_limited(
    argv: Sequence[str],
    plan: Plan,
    config: EngineConfig,
    *,
    state: Path,
    name: str,
    env: Mapping[str, str],
    detach: bool = False,
    contained: bool = False,
    cleanup_command: Sequence[str] = (),
    on_note: OnNote | None = None,
) -> Process:
    """Start an engine process with its limits; `on_note` receives a sentence for each, enforced or not.

    Restricts this process to the same CPUs, too, because it does I/O for the engine.
    """
    limits = await asyncio.to_thread(prepare_limits, plan, config, name=name, contained=contained)
    changed = {key: value for key, value in limits.env if key in env}
    try:
        process = await Process.start(
            (*limits.wrapper, *argv),
            log=registry.log_path(state, name),
            env={**env, **changed},
            preparation=limits.preparation,
            detach=detach,
            cleanup_command=(*cleanup_command, *limits.cleanup_command),
            predicted_host_bytes=host_bytes(plan),
        )
    except BaseException:
        limits.undo()
        raise
    if limits.own_cpus is not None:
        restrict_to_cpus(limits.own_cpus)
    if limits.applied is None:
        _path(state, name).unlink(missing_ok=True)
        return process
    _write(state, name, process.pid, limits.applied)
    if on_note is not None:
        if limits.wrapper:
            await _wait_for_scope(process.pid.pid)
        for note in verified(limits.applied, process.pid.pid).describe():
            on_note(note)
    return process


async def _wait_for_scope(pid: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_SCOPE_TIMEOUT_S):
            while memory_limit_of(pid) is None:
                await asyncio.sleep(_POLL_S)


def current_limits(state: Path, record: registry.Record) -> AppliedLimits | None:
    """The limits of a running engine, checked in the kernel; None if nothing is reserved or stored."""
    try:
        given = json.loads(_path(state, record.name).read_text(encoding="utf-8"))
        if Pid(**given["engine"]) != record.engine:
            return None
        stored = given["kept"]
        kept = AppliedLimits(
            **{
                **stored,
                "left": tuple(stored["left"]),
                "lacking": tuple(stored["lacking"]),
                "cpus": None if stored["cpus"] is None else tuple(stored["cpus"]),
            }
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return verified(kept, record.engine.pid)


def _write(state: Path, name: str, engine: Pid, kept: AppliedLimits) -> None:
    text = json.dumps({"engine": asdict(engine), "kept": asdict(kept)})
    replace_file(_path(state, name), text.encode())


def _path(state: Path, name: str) -> Path:
    return registry.folder(state, name) / "reserve.json"
