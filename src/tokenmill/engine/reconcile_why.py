"""Why a plan and an engine differ, where that is known.

Compute buffers can be predicted again for what the engine's log says it was asked: how many rows of logits it keeps
and whether its sequences share a cache. The rest are reasons that have been seen.
"""

from typing import Literal

from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.logs.parsed import RequestedContext
from tokenmill.launch.binding import HOST_TIERS
from tokenmill.model.profile import TensorClass
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.compute_graph.llama_cpp import build_graph
from tokenmill.planner.memory.kv_cells import context_of, largest_batch
from tokenmill.planner.plan import Plan
from tokenmill.units import format_bytes

HOST = "host"


def compute_as_asked(plan: Plan, tier: str, asked: RequestedContext) -> int | None:
    """The plan's compute buffer for what the engine says it was asked; None: not said, or not simply computed.

    Known for today's llama.cpp where one kind of device computes everything.
    """
    if plan.settings.engine != "llama.cpp" or asked.outputs is None:
        return None
    device = "dram" if tier == HOST else tier
    devices = {*plan.placement.layers, plan.placement.head}
    homes = {
        home
        for tensor, home in zip(plan.profile.tensors, plan.placement.homes, strict=True)
        if tensor.cls is TensorClass.ROUTED_EXPERTS
    }
    on_host = all(name in HOST_TIERS for name in devices)
    if not on_host and (devices | homes != {device}):
        return None
    context = context_of(plan.settings, unified=asked.unified is not False, outputs=asked.outputs)
    sketch = build_graph(plan.profile, largest_batch(plan.profile, context), embed=on_host, head=True)
    return buffer_bytes(sketch.steps)


def why_engine(
    plan: Plan,
    tier: str,
    item: str,
    asked: RequestedContext,
    as_asked: int | None,
    predicted: int,
    measured: int,
    *,
    mapped: bool | None,
) -> str | None:
    """A likely reason why one of the engine's buffers is not as predicted."""
    if asked.tokens is not None and item in ("kv", "compute") and asked.tokens < plan.settings.cells:
        return f"the engine made a context of {asked.tokens} tokens, the plan of {plan.settings.cells}"
    if item == "compute":
        return _compute(plan, asked, as_asked)
    if item == "weights" and tier == HOST:
        return _host_weights(plan, predicted, measured, mapped=mapped)
    if item == "repack" and measured < predicted:
        return "the engine was built for fewer instructions than the processor has, or was told not to rewrite"
    return None


def _host_weights(plan: Plan, predicted: int, measured: int, *, mapped: bool | None) -> str | None:
    if mapped is not None and mapped != plan.settings.mmap:
        did, planned = ("mapped", "copied") if mapped else ("copied", "mapped")
        return f"the engine {did} the file, and the plan has it {planned}"
    if mapped and plan.placement.gpus and measured > predicted:
        return "a mapped buffer spans whole stretches of the file, tensors that went to a GPU among them"
    if mapped and plan.settings.repack and measured < predicted:
        return "rewritten tensors at the ends of the file are outside the mapped buffer"
    return None


def _compute(plan: Plan, asked: RequestedContext, as_asked: int | None) -> str | None:
    rows = largest_batch(plan.profile, context_of(plan.settings)).outputs
    if asked.outputs is None or rows is None or asked.outputs >= rows:
        return None
    known = "" if as_asked is None else f"; for that it predicts {format_bytes(as_asked)}"
    return f"the engine keeps logits of {asked.outputs} tokens of a batch, the plan counted {rows}{known}"


def why_process(
    item: Literal["mapped", "own", "prompt_cache"],
    plan: Plan,
    predicted: int,
    measured: int,
    buffers: tuple[Buffer, ...],
) -> str | None:
    """A likely reason why a process is not as large as predicted."""
    if item == "prompt_cache":
        return "it fills while requests come" if measured < predicted else "its limit was not obeyed: watch it"
    if item == "mapped":
        if measured < predicted:
            return "pages that were not touched yet, or that the system dropped, are not resident"
        return "the program's own libraries are mapped too"
    if measured < predicted:
        allowed = format_bytes(TRAITS[plan.settings.engine].process_bytes)
        reasons = [f"the plan allows the program itself {allowed}, more than it needs"]
        if plan.settings.cache_ram_bytes:
            reasons.append("the prompt cache fills while requests come")
        if any(buffer.compute_bytes for buffer in buffers):
            reasons.append("compute buffers become resident with the first long prompt")
        return "; ".join(reasons)
    if not plan.settings.mmap:
        return "memory for reading the file is given back slowly"
    return None
