"""Forecasts a plan at other settings: speed, figures as a trial measures them, and whether memory holds them. Pure.

They serve to compare settings; a search scales them to its measurements.
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

    def says(dials: TrialSettings) -> float | None:
        if dials not in known:
            known[dials] = _jobs_tok_s(plan, aim, dials)
        return known[dials]

    return says


def _jobs_tok_s(plan: Plan, aim: Aim, dials: TrialSettings) -> float | None:
    """One round of jobs: every slot prefills its tail, then all decode together. The shared prefix is computed once."""
    if dials.placement not in (UNKNOWN, fingerprint(plan.profile, plan.placement)):
        return None
    settings = settings_at(plan, dials)
    depth = min(dials.context - 1, aim.prompt_tokens + aim.tail_tokens + aim.output_tokens // 2)
    write = decode_speed(
        plan.machine,
        plan.profile,
        settings,
        plan.placement,
        depth=max(0, depth),
        sequences=dials.sequences,
        calibration=plan.calibration,
    )
    if write is None:
        return None
    seconds = aim.output_tokens * dials.sequences / write.tok_s
    tails = aim.tail_tokens * dials.sequences
    if tails:
        read = prefill_speed(
            plan.machine,
            plan.profile,
            settings,
            plan.placement,
            depth=aim.prompt_tokens,
            prompt=tails,
            calibration=plan.calibration,
        )
        if read is None:
            return None
        seconds += tails / read.tok_s
    return aim.output_tokens * dials.sequences / seconds


def settings_at(plan: Plan, dials: TrialSettings) -> Settings:
    """A plan's settings at trial settings, with the offload threshold that an engine started for them would get."""
    settings = settings_with(plan.settings, dials)
    rows = choose_min_batch(plan.machine, plan.profile, settings, plan.placement, dials.offload_min_batch)
    return replace(settings, offload_min_batch=rows)


def settings_with(settings: Settings, dials: TrialSettings) -> Settings:
    """A plan's settings with those of a trial."""
    return replace(
        settings,
        threads=dials.threads,
        threads_batch=dials.threads_batch,
        sequences=dials.sequences,
        ubatch=dials.ubatch,
        batch=max(settings.batch, dials.ubatch),
        context=dials.context,
        cache_type_k=dials.cache_type_k,
        cache_type_v=dials.cache_type_v,
        flash_attention=dials.flash_attention,
        mmap=dials.mmap,
        repack=dials.repack,
        offload_min_batch=dials.offload_min_batch,
    )


def fits(plan: Plan, dials: TrialSettings) -> bool:
    """Whether the plan's placement has memory for these settings, by the ledger."""
    goal = replace(
        plan.goal,
        sequences=dials.sequences,
        context=dials.context,
        ubatch=dials.ubatch,
        mmap=dials.mmap,
        cache_type_k=dials.cache_type_k,
        cache_type_v=dials.cache_type_v,
        flash_attention=dials.flash_attention,
        repack=dials.repack,
        threads=dials.threads,
        threads_batch=dials.threads_batch,
    )
    return not make_draft(plan.machine, plan.profile, goal, plan.placement).shortfalls


def figures_at(plan: Plan, aim: Aim, dials: TrialSettings, *, depth: int, drawn: bool = True) -> Figures:
    """Predicted speeds of a plan at trial settings and `depth`; None if a fact is unknown.

    `drawn=False`: the jobs are the user's, so the aim's prompt lengths do not apply.
    """
    settings = settings_at(plan, dials)
    write = decode_speed(
        plan.machine,
        plan.profile,
        settings,
        plan.placement,
        depth=min(depth, dials.context - 1),
        sequences=dials.sequences,
        calibration=plan.calibration,
    )
    read = None
    if aim.prompt_tokens and drawn:
        read = prefill_speed(
            plan.machine,
            plan.profile,
            settings,
            plan.placement,
            depth=0,
            prompt=aim.prompt_tokens,
            calibration=plan.calibration,
        )
    return Figures(
        decode_tok_s=None if write is None else write.tok_s,
        prefill_tok_s=None if read is None else read.tok_s,
        jobs_tok_s=forecaster(plan, aim)(dials) if drawn else None,
    )
