"""What the forecast says of dials, in the figures that a trial measures. Pure."""

from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.tuner.point import Aim, Figures, TrialSettings
from tokenmill.tuner.predicted import forecaster, settings_at


def figures_at(plan: Plan, aim: Aim, dials: TrialSettings, *, depth: int, drawn: bool = True) -> Figures:
    """Speeds of a plan at other dials, with prompts of so many tokens; None where the machine does not state enough.

    Not `drawn`: the jobs are somebody's own, and what the aim says of their lengths is not so.
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
