"""Chooses the open settings that do not depend on the placement: context, threads, batch sizes, cache types."""

from tokenmill.config import MAX_THREADS
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.model.tensor_types import CACHE_TYPES
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Decision, Settings

DEFAULT_CONTEXT = 32768


def choose_settings(
    machine: Machine, profile: Profile, goal: Goal, *, with_gpu: bool
) -> tuple[Settings, tuple[Decision, ...]]:
    """Choose all settings except mmap and repacking, which depend on the placement.

    Raises `UsageError` for values that the engine or the model does not support.
    """
    decisions = []
    context = goal.context or min(DEFAULT_CONTEXT, profile.training_context or DEFAULT_CONTEXT)
    for kind in (goal.cache_type_k, goal.cache_type_v):
        _check_cache_type(kind, goal.engine)
    threads, reason = _threads(machine, goal, with_gpu=with_gpu)
    if goal.threads is None:
        decisions.append(Decision("threads", str(threads), reason))
    ubatch = min(goal.ubatch or 512, goal.total_cells or context, goal.batch or goal.total_cells or context)
    settings = Settings(
        engine=goal.engine,
        context=context,
        sequences=goal.sequences or 1,
        ubatch=ubatch,
        batch=goal.batch or max(2048, ubatch),
        cache_type_k=goal.cache_type_k or "f16",
        cache_type_v=_cache_type_v(profile, goal),
        threads=threads,
        threads_batch=goal.threads_batch or threads,
        flash_attention=goal.flash_attention,
        mmap=goal.mmap if goal.mmap is not None else True,
        mlock=goal.mlock,
        repack=goal.repack if goal.repack is not None else not with_gpu,
        cache_ram_bytes=goal.cache_ram_bytes,
        ik=goal.ik,
        moe_cache_bytes=goal.moe_cache_bytes,
        full_windows=goal.full_windows,
        unified=_unified(goal),
        output_rows=goal.output_rows,
        state_ids=goal.state_ids if any(layer.kind == "recurrent" for layer in profile.cache) else None,
        gpu_memory_utilization=goal.gpu_memory_utilization,
        tensor_parallel=goal.tensor_parallel,
        mtp=goal.speculation is not None and goal.speculation.model is None,
        draft_model=None if goal.speculation is None else goal.speculation.source,
        draft_tokens=None if goal.speculation is None else goal.speculation.tokens,
        total_cells=goal.total_cells,
        shared_tokens=goal.shared_tokens,
    )
    return settings, tuple(decisions)


def _unified(goal: Goal) -> bool:
    """Whether all sequences share one cache; llama-server's `-np` slots do so only with `--kv-unified`."""
    if goal.unified is not None:
        return goal.unified
    return goal.full_windows or (goal.sequences or 1) == 1


def _check_cache_type(kind: str | None, engine: str) -> None:
    known = [name for name in CACHE_TYPES if (name == "fp8") == (engine == "vllm") or name in ("f16", "bf16")]
    known = [name for name in known if name != "q6_0" or engine.startswith("ik_llama")]
    if kind is not None and kind not in known:
        raise UsageError(f"{engine} has no cache type {kind!r}", hint=f"use one of {', '.join(known)}")


def _cache_type_v(profile: Profile, goal: Goal) -> str:
    """Type of the V cache; a latent cache has no V, and engines reject a different type for it."""
    type_k = goal.cache_type_k or "f16"
    latent = any(layer.kind in ("latent", "compressed") for layer in profile.cache)
    if latent and goal.engine == "llama.cpp":
        return type_k
    return goal.cache_type_v or type_k


def _threads(machine: Machine, goal: Goal, *, with_gpu: bool) -> tuple[int, str]:
    cores = machine.cpu.cores
    if goal.threads is not None:
        return goal.threads, "--threads"
    if cores is None:
        return 8, "a default, because the number of cores is unknown; set --threads"
    allowed = min(cores, int(machine.limits.cgroup_cpus or cores) or 1)
    if goal.reserve_cores >= allowed:
        raise UsageError(
            f"--reserve-cores {goal.reserve_cores} leaves no core for the engine, which can use {allowed}",
            hint=f"reserve at most {max(0, allowed - 1)}",
        )
    threads = allowed - goal.reserve_cores
    reason = f"{allowed} physical cores"
    if goal.reserve_cores:
        reason += f" minus {goal.reserve_cores} for --reserve-cores"
    elif with_gpu and allowed > 8:
        threads -= 1
        reason += " minus one for the GPU driver"
    return min(threads, MAX_THREADS), reason + "; hyper-threads do not speed up memory-bound work"
