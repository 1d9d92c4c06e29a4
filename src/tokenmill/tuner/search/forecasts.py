"""Forecasts of a plan at other settings: speeds as a trial measures them, and whether they fit in memory. Pure.

Used to compare settings; a search scales them to its measurements.
"""

from collections.abc import Callable
from dataclasses import replace

from tokenmill.planner.draft import make_draft
from tokenmill.planner.placement import UNKNOWN, fingerprint
from tokenmill.planner.plan import Plan, Settings
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.planner.speed.offload import choose_min_batch
from tokenmill.tuner.point import Aim, Figures, TrialSettings


def forecaster(plan: Plan, aim: Aim) -> Callable[[TrialSettings], float | None]:
    """A cached function from settings to output tok/s with prompt time included; None if a fact is unknown.

    Placements other than the plan's have no forecast.
    """
    known: dict[TrialSettings, float | None] = {}

    def forecast(settings: TrialSettings) -> float | None:
        if settings not in known:
            known[settings] = _jobs_tok_s(plan, aim, settings)
        return known[settings]

    return forecast


def _jobs_tok_s(plan: Plan, aim: Aim, settings: TrialSettings) -> float | None:
    """Models one round of jobs: every slot prefills its tail, then all decode concurrently."""
    if settings.placement not in (UNKNOWN, fingerprint(plan.profile, plan.placement)):
        return None
    planned = settings_at(plan, settings)
    depth = min(settings.context - 1, aim.prompt_tokens + aim.tail_tokens + aim.output_tokens // 2)
    write = decode_speed(
        plan.machine,
        plan.profile,
        planned,
        plan.placement,
        depth=max(0, depth),
        sequences=settings.sequences,
        calibration=plan.calibration,
    )
    if write is None:
        return None
    seconds = aim.output_tokens * settings.sequences / write.tok_s
    tails = aim.tail_tokens * settings.sequences
    if tails:
        read = prefill_speed(
            plan.machine,
            plan.profile,
            planned,
            plan.placement,
            depth=aim.prompt_tokens,
            prompt=tails,
            calibration=plan.calibration,
        )
        if read is None:
            return None
        seconds += tails / read.tok_s
    return aim.output_tokens * settings.sequences / seconds


def settings_at(plan: Plan, settings: TrialSettings) -> Settings:
    """A plan's settings with those of a trial, and the offload threshold of an engine that is started for them."""
    planned = settings_with(plan.settings, settings)
    rows = choose_min_batch(plan.machine, plan.profile, planned, plan.placement, settings.offload_min_batch)
    return replace(planned, offload_min_batch=rows)


def settings_with(planned: Settings, settings: TrialSettings) -> Settings:
    """A plan's settings with those of a trial."""
    return replace(
        planned,
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        sequences=settings.sequences,
        ubatch=settings.ubatch,
        batch=max(planned.batch, settings.ubatch),
        context=settings.context,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        mmap=settings.mmap,
        repack=settings.repack,
        offload_min_batch=settings.offload_min_batch,
    )


def fits(plan: Plan, settings: TrialSettings) -> bool:
    """Whether these settings fit in memory with the plan's placement, according to the ledger."""
    goal = replace(
        plan.goal,
        sequences=settings.sequences,
        context=settings.context,
        ubatch=settings.ubatch,
        mmap=settings.mmap,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        repack=settings.repack,
        threads=settings.threads,
        threads_batch=settings.threads_batch,
    )
    return not make_draft(plan.machine, plan.profile, goal, plan.placement).shortfalls


def figures_at(plan: Plan, aim: Aim, settings: TrialSettings, *, depth: int, generated: bool = True) -> Figures:
    """Predicted speeds of a plan at trial settings and `depth`; None if a fact is unknown.

    `generated=False`: the user's jobs, to which the aim's prompt lengths do not apply.
    """
    planned = settings_at(plan, settings)
    write = decode_speed(
        plan.machine,
        plan.profile,
        planned,
        plan.placement,
        depth=min(depth, settings.context - 1),
        sequences=settings.sequences,
        calibration=plan.calibration,
    )
    read = None
    if aim.prompt_tokens and generated:
        read = prefill_speed(
            plan.machine,
            plan.profile,
            planned,
            plan.placement,
            depth=0,
            prompt=aim.prompt_tokens,
            calibration=plan.calibration,
        )
    return Figures(
        decode_tok_s=None if write is None else write.tok_s,
        prefill_tok_s=None if read is None else read.tok_s,
        jobs_tok_s=forecaster(plan, aim)(settings) if generated else None,
    )
