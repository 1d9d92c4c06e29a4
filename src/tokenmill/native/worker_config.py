"""Configuration of a native worker, passed as JSON on its command line, and its sequence id limits."""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tokenmill.model.profile import Profile
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.planner.goal import Goal

MAX_SEQUENCES = 127  # a cell distinguishes 256 ids, and some models need two per sequence
MAX_SEQUENCES_UNWINDOWED = 255  # for models that need one id per sequence
INTERACTIVE_SLOTS = 4  # slots in addition to the plan's, for interactive requests
RETAINED_SEQUENCES = 48  # ids for cached prefixes that no running sequence uses


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that a worker needs to load a model and listen."""

    socket: Path
    model: Path
    model_id: str
    name: str  # model name in answers
    weights: ModelSettings
    context: ContextSettings
    slots: int
    interactive_slots: int = INTERACTIVE_SLOTS
    library: Path | None = None
    header: Path | None = None


WORKER_CONFIG = TypeAdapter(WorkerConfig)


def goal_for(goal: Goal) -> Goal:
    """Adapt a goal to this engine: full windows, and logits only for tokens that are sampled from."""
    slots = goal.sequences or 1
    return replace(goal, full_windows=True, unified=True, output_rows=sequences_for(slots, INTERACTIVE_SLOTS))


def max_slots(profile: Profile) -> int:
    """Return the maximum number of batch slots of a model, in addition to the interactive ones."""
    windowed = any(cache.span_tokens is not None for cache in profile.cache)
    return (MAX_SEQUENCES if windowed else MAX_SEQUENCES_UNWINDOWED) - INTERACTIVE_SLOTS


def sequences_for(slots: int, interactive_slots: int) -> int:
    """Return the number of sequence ids a context needs for running sequences and cached prefixes."""
    running = slots + interactive_slots
    most = MAX_SEQUENCES if running <= MAX_SEQUENCES else MAX_SEQUENCES_UNWINDOWED
    return max(running, min(most, running + RETAINED_SEQUENCES))
