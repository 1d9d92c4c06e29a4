"""Configuration of a native worker, passed as JSON on its command line, and its sequence id limits."""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from tokenmill.model.profile import Profile
from tokenmill.native.llama.library import WHEEL_MAX_SEQUENCES
from tokenmill.native.llama.settings import ContextSettings, ModelSettings
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.goal import Goal

INTERACTIVE_SLOTS = 4  # slots in addition to the plan's, for interactive requests
RETAINED_SEQUENCES = 48  # ids for cached prefixes that no running sequence uses
RETAINED_STATES = 12  # the same in models with a recurrent state, of which each id has one: megabytes to tens of them


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
    narrow_rows: int = 0  # steps with fewer tokens copy no experts to a GPU, which larger ones do; 0: none do
    special_tokens_in_messages: bool = False  # parse special tokens in message contents
    library: Path | None = None
    header: Path | None = None


WORKER_CONFIG = TypeAdapter(WorkerConfig)


def goal_for(goal: Goal, limit: int = WHEEL_MAX_SEQUENCES) -> Goal:
    """Adapt a goal to this engine: full windows, and logits only for tokens that are sampled from.

    `limit`: sequence ids that the library was compiled for.
    """
    slots = goal.sequences or 1
    rows = sequences_for(slots, INTERACTIVE_SLOTS, limit)
    if goal.engine == "ik_llama" and goal.ik is None:
        # Repacked tensors are faster on processors, and GPUs cannot read them.
        goal = replace(goal, ik=IkOptions(rtr=goal.cpu_only))
    return replace(goal, full_windows=True, unified=True, output_rows=rows, state_ids=state_ids(slots) + 1)


def state_ids(slots: int) -> int:
    """Return the number of sequence ids of a model with a recurrent state; its context has one more, for saving."""
    return slots + INTERACTIVE_SLOTS + RETAINED_STATES


def max_slots(profile: Profile, limit: int = WHEEL_MAX_SEQUENCES) -> int:
    """Return the maximum number of batch slots of a model, in addition to the interactive ones.

    `limit`: sequence ids that the library was compiled for. Models with sliding windows need two for each sequence.
    """
    windowed = any(cache.span_tokens is not None for cache in profile.cache)
    return limit // (2 if windowed else 1) - 1 - INTERACTIVE_SLOTS


def sequences_for(slots: int, interactive_slots: int, limit: int = WHEEL_MAX_SEQUENCES) -> int:
    """Return the number of sequence ids a context needs for running sequences and cached prefixes.

    If it is not known whether the model needs two ids for each sequence, retained prefixes get only ids that both have.
    """
    running = slots + interactive_slots
    most = limit // 2 - 1 if running <= limit // 2 - 1 else limit - 1
    return max(running, min(most, running + RETAINED_SEQUENCES))
