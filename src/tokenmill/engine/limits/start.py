"""Starts an engine process with its reserve enforced; stores the applied limits next to its record (reserve.json)."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.cgroup import memory_limit_of
from tokenmill.engine.limits.reserve import AppliedLimits, arrange, keep_off, seen
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import Pid
from tokenmill.engine.process.process import Process
from tokenmill.launch.binding import host_bytes
from tokenmill.planner.plan import Plan
from tokenmill.storage.atomic import replace_file

Told = Callable[[str], None]
_SCOPE_S, _POLL_S = 20.0, 0.02  # for systemd to have made a scope around what already runs


async def start_kept(
    argv: Sequence[str],
    plan: Plan,
    config: EngineConfig,
    *,
    state: Path,
    name: str,
    env: Mapping[str, str],
    detach: bool = False,
    contained: bool = False,
    afterwards: Sequence[str] = (),
    told: Told | None = None,
) -> Process:
    """Start an engine's process with its reserve enforced as far as that is possible; `told` hears how far.

    This process keeps off the reserved cores from then on, too: it reads and writes for the engine.
    """
    arranged = await asyncio.to_thread(arrange, plan, config, name=name, contained=contained)
    changed = {key: value for key, value in arranged.env if key in env}
    try:
        process = await Process.start(
            (*arranged.before, *argv),
            log=registry.log_path(state, name),
            env={**env, **changed},
            preparation=arranged.preparation,
            detach=detach,
            afterwards=(*afterwards, *arranged.afterwards),
            predicted_host_bytes=host_bytes(plan),
        )
    except BaseException:
        arranged.undo()
        raise
    if arranged.own_cpus is not None:
        keep_off(arranged.own_cpus)
    if arranged.kept is None:
        _path(state, name).unlink(missing_ok=True)
        return process
    _write(state, name, process.pid, arranged.kept)
    if told is not None:
        if arranged.before:
            await _in_scope(process.pid.pid)
        for words in seen(arranged.kept, process.pid.pid).as_words():
            told(words)
    return process


async def _in_scope(pid: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_SCOPE_S):
            while memory_limit_of(pid) is None:
                await asyncio.sleep(_POLL_S)


def kept_now(state: Path, record: registry.Record) -> AppliedLimits | None:
    """What a running engine leaves to others, as the kernel says now; None: nothing is reserved, or it is not told."""
    try:
        given = json.loads(_path(state, record.name).read_text(encoding="utf-8"))
        if Pid(**given["engine"]) != record.engine:
            return None
        said = given["kept"]
        kept = AppliedLimits(
            **{
                **said,
                "left": tuple(said["left"]),
                "lacking": tuple(said["lacking"]),
                "cpus": None if said["cpus"] is None else tuple(said["cpus"]),
            }
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return seen(kept, record.engine.pid)


def _write(state: Path, name: str, engine: Pid, kept: AppliedLimits) -> None:
    text = json.dumps({"engine": asdict(engine), "kept": asdict(kept)})
    replace_file(_path(state, name), text.encode())


def _path(state: Path, name: str) -> Path:
    return registry.folder(state, name) / "reserve.json"
