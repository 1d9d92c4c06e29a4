"""Memory of speculative decoding: the context of the prediction layers, or a draft model.

Both run on the device of the output, with the target's slots and context and a cache of 16 bits. The weights of
prediction layers belong to the model; those of a draft model are counted here. Follows llama-server b11549.
"""

from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.model.profile import Profile
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.builder import GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.compute_graph.llama_cpp import build_graph, build_prediction_graph
from tokenmill.planner.goal import Goal, Speculation
from tokenmill.planner.memory.kv_cells import KvContext, context_of, kv_bytes, largest_batch
from tokenmill.planner.plan import Placement, Settings

CACHE_TYPE = "f16"  # --spec-draft-type-k and -v
MAX_VOCABULARY_DIFFERENCE = 128  # tokens; llama.cpp refuses draft models that differ more


def draft_bytes(profile: Profile, settings: Settings, speculation: Speculation | None) -> int:
    """Bytes of speculative decoding on the device of the output, without the weights of prediction layers."""
    if speculation is None:
        return 0
    drafts = speculation.model or profile
    context = draft_context(settings, prediction=speculation.model is None)
    batch = largest_batch(drafts, context)
    weights = 0 if speculation.model is None else drafts.bytes
    return weights + sum(kv_bytes(drafts, context)) + buffer_bytes(_graph(drafts, batch, context).steps)


def drafter(placement: Placement, host: str) -> str:
    """The tier of the device that drafts tokens."""
    return placement.head if placement.head.startswith("gpu") else host


def check_speculation(profile: Profile, goal: Goal) -> None:
    """Raise `UsageError` if the engine or the model cannot decode speculatively as requested."""
    wanted = goal.speculation
    if wanted is None:
        return
    if goal.engine == "vllm":
        raise UsageError("plans for vllm do not count drafted tokens", hint="omit --mtp and --draft-model")
    if wanted.tokens < 1:
        raise UsageError(f"draft_tokens must be at least 1 (got {wanted.tokens})")
    if wanted.model is None:
        if goal.engine == "llama.cpp-2025":
            raise UsageError("llama.cpp of 2025 cannot use prediction layers", hint="plan for the current llama.cpp")
        if not profile.prediction:
            raise UsageError(
                f"{profile.name} has no layers for multi-token prediction in this file",
                hint="use a file that contains them, or a draft model with --draft-model",
            )
        return
    own, other = profile.vocabulary or 0, wanted.model.vocabulary or 0
    if abs(own - other) > MAX_VOCABULARY_DIFFERENCE:
        raise UsageError(
            f"the draft model {wanted.model.name} has {other} tokens, but {profile.name} has {own}",
            hint="use a draft model of the same family, with the same vocabulary",
        )


def loads_prediction(settings: Settings) -> bool:
    """Whether the engine loads the prediction layers."""
    return settings.mtp or TRAITS[settings.engine].loads_mtp


def draft_context(settings: Settings, *, prediction: bool) -> KvContext:
    """The context that drafts tokens, with prediction layers or a draft model."""
    return replace(
        context_of(settings),
        type_k=CACHE_TYPE,
        type_v=CACHE_TYPE,
        outputs=settings.sequences,
        drafts=prediction,
        snapshots=0,
    )


def _graph(profile: Profile, batch: MicroBatch, context: KvContext) -> GraphBuilder:
    return build_prediction_graph(profile, batch) if context.drafts else build_graph(profile, batch)
