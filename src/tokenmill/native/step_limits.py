"""How long a step of the native engine may take before the engine counts as unresponsive, and before it is killed.

Both limits follow the plan: a step of a small model takes milliseconds, one that streams experts over PCIe 20 seconds.
The time in which the process reads mapped weights from the disk does not count (`ReadWatch`). A process that sends no
heartbeats is stopped or starved whatever its plan is.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from tokenmill.planner.plan import Plan

UNRESPONSIVE_STEPS = 4  # multiples of the predicted step time
KILL_STEPS = 12
MIN_UNRESPONSIVE_S = 5.0
MIN_KILL_S = 30.0
UNKNOWN_UNRESPONSIVE_S = 60.0  # if the step time is not predicted
UNKNOWN_KILL_S = 600.0


@dataclass(frozen=True, slots=True)
class StepTimeLimits:
    """Limits of one step, and of the silence between two heartbeats."""

    unresponsive_s: float = UNKNOWN_UNRESPONSIVE_S
    kill_s: float = UNKNOWN_KILL_S
    silent_s: float = MIN_UNRESPONSIVE_S
    silent_kill_s: float = MIN_KILL_S


def step_limits(plan: Plan, configured_s: float | None) -> StepTimeLimits:
    """The limits for an engine of this plan; `configured_s` is `engine.step_limit_s`, after which it is killed."""
    step_s = predicted_step_s(plan)
    unresponsive_s = UNKNOWN_UNRESPONSIVE_S if step_s is None else max(MIN_UNRESPONSIVE_S, UNRESPONSIVE_STEPS * step_s)
    if configured_s is not None:
        return StepTimeLimits(
            min(unresponsive_s, configured_s), configured_s, min(MIN_UNRESPONSIVE_S, configured_s), configured_s
        )
    kill_s = UNKNOWN_KILL_S if step_s is None else max(MIN_KILL_S, KILL_STEPS * step_s)
    return StepTimeLimits(unresponsive_s, kill_s)


def predicted_step_s(plan: Plan) -> float | None:
    """The predicted time of the longest step: all sequences at full depth, or the largest prefill; None: unknown."""
    settings = plan.settings
    decode = [
        settings.sequences / speed.tok_s for speed in plan.forecast.decode if speed.sequences == settings.sequences
    ]
    tokens = max(settings.ubatch, settings.sequences)
    prefill = [tokens / speed.tok_s for speed in plan.forecast.prefill if speed.ubatch == settings.ubatch]
    return max(decode) + max(prefill) if decode and prefill else None


class ReadWatch:
    """Notices that a process reads mapped pages from the disk, by its major page faults."""

    def __init__(self, pid: int | None) -> None:
        self._stat = None if pid is None else Path(f"/proc/{pid}/stat")
        self._faults: int | None = None
        self._changed_s: float | None = None

    def since_read_s(self) -> float:
        """Seconds since the last check that found new page faults; infinite without one."""
        faults = self._read()
        now_s = time.monotonic()
        if self._faults is not None and faults is not None and faults > self._faults:
            self._changed_s = now_s
        self._faults = faults
        return float("inf") if self._changed_s is None else now_s - self._changed_s

    def _read(self) -> int | None:
        try:
            text = self._stat.read_text(encoding="utf-8", errors="replace") if self._stat is not None else ""
            return int(text.rpartition(")")[2].split()[9])
        except (OSError, IndexError, ValueError):
            return None
