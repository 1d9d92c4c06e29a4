"""What a native worker is told when it is started."""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tokenmill.model.profile import Profile
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.planner.goal import Goal

MOST_SEQUENCES = 127  # ids in use, so that models which need two of each have them: cells can tell 256 apart
MOST_ALONE = 255  # where more run than such models could
INTERACTIVE_LANES = 4  # sequences beyond the plan's, for interactive requests
KEPT_HEADS = 48  # ids for heads that no sequence is using


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told."""

    socket: Path
    model: Path
    model_id: str
    name: str  # of the model, in answers
    weights: ModelSettings
    context: ContextSettings
    lanes: int
    interactive_lanes: int = INTERACTIVE_LANES
    library: Path | None = None
    header: Path | None = None


ORDER = TypeAdapter(WorkerConfig)


def goal_for(goal: Goal) -> Goal:
    """A goal with what this engine does its own way: whole windows, and logits only of tokens that are drawn from."""
    lanes = goal.sequences or 1
    return replace(goal, full_windows=True, unified=True, output_rows=sequences_for(lanes, INTERACTIVE_LANES))


def most_lanes(profile: Profile) -> int:
    """Lanes that a context of a model can have beside those for interactive requests."""
    windowed = any(cache.span_tokens is not None for cache in profile.cache)
    return (MOST_SEQUENCES if windowed else MOST_ALONE) - INTERACTIVE_LANES


def sequences_for(lanes: int, interactive_lanes: int) -> int:
    """Ids that a context needs: for what runs and for heads that are kept."""
    running = lanes + interactive_lanes
    most = MOST_SEQUENCES if running <= MOST_SEQUENCES else MOST_ALONE
    return max(running, min(most, running + KEPT_HEADS))
