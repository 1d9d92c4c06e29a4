"""Predicted time of one job that runs alone: a whole prompt, then its answer. Pure."""

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import JobTime, Placement, Settings
from tokenmill.planner.speed.calibration import Calibration
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed

ANSWER_TOKENS = 300
PROMPTS = (1024, 4096, 16384)  # lengths that every plan shows, as far as they fit its context


def job_time(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    *,
    prompt: int,
    answer: int,
    calibration: Calibration | None = None,
) -> JobTime | None:
    """Time of a job with an empty cache; None if a fact of the machine is unknown."""
    read = prefill_speed(machine, profile, settings, placement, depth=0, prompt=prompt, calibration=calibration)
    # decoding slows down linearly with depth, so the middle of the answer is its average
    write = decode_speed(machine, profile, settings, placement, depth=prompt + answer // 2, calibration=calibration)
    if read is None or write is None:
        return None
    return JobTime(prompt, answer, prompt / read.tok_s, answer / write.tok_s)


def job_times(
    machine: Machine,
    profile: Profile,
    settings: Settings,
    placement: Placement,
    calibration: Calibration | None = None,
) -> tuple[JobTime, ...]:
    """Times of jobs of typical lengths, and of the longest prompt that leaves room for the answer."""
    longest = settings.context - ANSWER_TOKENS
    prompts = [prompt for prompt in PROMPTS if prompt < longest] + [longest] * (longest > 0)
    found = (
        job_time(machine, profile, settings, placement, prompt=prompt, answer=ANSWER_TOKENS, calibration=calibration)
        for prompt in prompts
    )
    return tuple(filter(None, found))
