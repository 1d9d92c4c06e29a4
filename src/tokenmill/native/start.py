"""Starts a native worker for a plan: its settings, its environment, its process."""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.start import OnNote, start_limited
from tokenmill.engine.process import registry
from tokenmill.engine.process.process import Process
from tokenmill.errors import EngineError, UsageError
from tokenmill.launch.binding import host_bytes
from tokenmill.launch.dialect import offload_floor, visible_gpus
from tokenmill.model.identity import identity_of
from tokenmill.model.profile import Profile
from tokenmill.native.builds.finished import max_sequences
from tokenmill.native.client import NativeEngine
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.native.step_limits import step_limits
from tokenmill.native.verify import request
from tokenmill.native.worker_config import INTERACTIVE_SLOTS, WORKER_CONFIG, WorkerConfig, sequences_for
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.offload import effective_min_batch
from tokenmill.storage.private import private_folder

_IK_ROWS = 16  # rows that ik_llama.cpp interleaves when it repacks
_MOST_SOCKET_BYTES = 100  # sun_path holds 108


async def start(
    plan: Plan,
    *,
    model_path: Path,
    config: EngineConfig,
    state: Path,
    name: str,
    began: Callable[[Process], None] | None = None,
    detach: bool = False,
    on_note: OnNote | None = None,
) -> NativeEngine:
    """Load a model in a worker process and wait until it answers; unless detached, it ends with this process.

    `began` receives the process before it has loaded anything, `on_note` a sentence about each limit of the engine.
    """
    ids = sequences_for(plan.settings.sequences, INTERACTIVE_SLOTS, max_sequences(config))
    weights, context = settings_of(plan, sequences=ids)
    worker_config = WorkerConfig(
        socket=socket_path(state, name),
        model=model_path,
        model_id=identity_of(model_path),
        name=plan.profile.name,
        weights=weights,
        context=replace(context, batch=max(context.ubatch, context.sequences)),
        slots=plan.settings.sequences,
        interactive_slots=INTERACTIVE_SLOTS,
        narrow_rows=_narrow_rows(plan),
        special_tokens_in_messages=config.special_tokens_in_messages,
        library=_path(config.library),
        header=_path(config.header),
    )
    argv = [sys.executable, "-m", "tokenmill.native.worker", WORKER_CONFIG.dump_json(worker_config).decode()]
    process = await start_limited(
        argv, plan, config, state=state, name=name, env=environment_of(plan), detach=detach, on_note=on_note
    )
    record = registry.Record(
        name=name,
        kind="native",
        engine=process.pid,
        supervisor=process.supervisor,
        address=str(worker_config.socket),
        model=worker_config.name,
        model_id=worker_config.model_id,
        build="native",
        argv=tuple(argv[:3]),
        started=time.time(),
        log=str(process.log),
        detached=detach,
        predicted_host_bytes=host_bytes(plan),
    )
    if began is not None:
        began(process)
    try:
        registry.write(state, record)  # before it is ready: this process may end during the load
        engine = await NativeEngine.connect(
            worker_config.socket, process=process, owned=not detach, limits=step_limits(plan, config.step_limit_s)
        )
    except BaseException:
        await process.kill()
        registry.forget(state, record)
        raise
    registry.write(state, replace(record, build=engine.identity.build))
    return engine


def settings_of(plan: Plan, *, sequences: int | None = None) -> tuple[ModelSettings, ContextSettings]:
    """The settings of a plan; `sequences` overrides the plan's number of sequence ids."""
    if plan.settings.engine not in ("llama.cpp", "ik_llama"):
        raise UsageError(
            f"a plan for {plan.settings.engine} cannot run in the native engine", hint="plan for --engine native"
        )
    settings = plan.settings
    placed = request(plan)
    model = ModelSettings(
        gpus=placed.gpus,
        gpu_layers=placed.gpu_layers,
        tensor_split=placed.tensor_split,
        overrides=placed.overrides,
        mmap=settings.mmap,
        mlock=settings.mlock,
        repack=placed.repack if settings.ik is None else settings.ik.rtr and _can_repack(plan.profile),
    )
    context = ContextSettings(
        cells=settings.cells,
        context=settings.context,
        sequences=settings.sequences if sequences is None else sequences,
        ubatch=settings.ubatch,
        batch=max(settings.batch, settings.ubatch),
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        moe_cache_bytes=settings.moe_cache_bytes,
        streams=settings.per_slot,
        lockstep=settings.per_slot,
    )
    return model, context


def _can_repack(profile: Profile) -> bool:
    """Whether ik_llama.cpp can repack a model; with other sizes its kernels end the process."""
    return all(tensor.shape[1] % _IK_ROWS == 0 for tensor in profile.tensors if len(tensor.shape) > 1)


def environment_of(plan: Plan) -> dict[str, str]:
    """Environment variables of the worker; CUDA and ggml read them before any Python code runs."""
    found = visible_gpus(plan)
    gpus = request(plan).gpus
    if "CUDA_VISIBLE_DEVICES" in found:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))  # in the placement's order
    floor = offload_floor(plan)
    if floor is not None:
        found["GGML_OP_OFFLOAD_MIN_BATCH"] = str(floor)
    return found


def socket_path(state: Path, name: str) -> Path:
    """The socket of a worker: next to its record, or in a folder with a short path if that is too long."""
    beside = registry.folder(state, name).absolute() / "socket"
    if len(os.fsencode(beside)) <= _MOST_SOCKET_BYTES:
        private_folder(beside.parent)
        return beside
    short = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"tokenmill-{os.getuid()}"
    try:
        short.mkdir(mode=0o700, exist_ok=True)
        if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
            raise EngineError(
                f"{short} can be accessed by other users", hint="set XDG_RUNTIME_DIR, or a shorter state_dir"
            )
    except OSError as error:
        raise EngineError(f"cannot make {short} for the engine's socket: {error.strerror}") from error
    return short / hashlib.sha256(os.fsencode(beside)).hexdigest()[:24]


def _narrow_rows(plan: Plan) -> int:
    """The rows from which a step copies experts to a GPU, if steps of all slots do; else 0."""
    rows = effective_min_batch(plan.profile, plan.settings, plan.placement)
    return rows if rows is not None and plan.settings.sequences >= rows else 0


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given).expanduser()
