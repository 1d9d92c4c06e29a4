"""Explains differences between a plan and a loaded engine.

Compute buffers are predicted again for the context settings in the engine's log: rows of logits, and whether sequences
share a KV cache. The other explanations are causes that were observed.
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


def predict_compute(plan: Plan, tier: str, requested: RequestedContext) -> int | None:
    """Predict the compute buffer for the logged context settings; None if it cannot be predicted.

    Supported for the current llama.cpp if all layers are on the same kind of device.
    """
    if plan.settings.engine != "llama.cpp" or requested.outputs is None:
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
    context = context_of(plan.settings, unified=requested.unified is not False, outputs=requested.outputs)
    sketch = build_graph(plan.profile, largest_batch(plan.profile, context), embed=on_host, head=True)
    return buffer_bytes(sketch.steps)


def why_engine(
    plan: Plan,
    tier: str,
    item: str,
    requested: RequestedContext,
    as_requested: int | None,
    predicted: int,
    measured: int,
    *,
    mapped: bool | None,
) -> str | None:
    """Likely cause of a difference in an engine's buffer; None if unknown."""
    if requested.tokens is not None and item in ("kv", "compute") and requested.tokens < plan.settings.cells:
        return f"the engine's context has {requested.tokens} tokens, the plan's has {plan.settings.cells}"
    if item == "compute":
        return _compute(plan, requested, as_requested)
    if item == "weights" and tier == HOST:
        return _host_weights(plan, predicted, measured, mapped=mapped)
    if item == "repack" and measured < predicted:
        return "the engine was built without some of the CPU's instructions, or repacking is disabled"
    return None


def _host_weights(plan: Plan, predicted: int, measured: int, *, mapped: bool | None) -> str | None:
    if mapped is not None and mapped != plan.settings.mmap:
        actual, planned = ("mapped", "copied") if mapped else ("copied", "mapped")
        return f"the engine {actual} the file, but the plan expects it to be {planned}"
    if mapped and plan.placement.gpus and measured > predicted:
        return "mapped buffers span ranges of the file that include tensors copied to a GPU"
    if mapped and plan.settings.repack and measured < predicted:
        return "repacked tensors at the start and end of the file are outside the mapped buffer"
    return None


def _compute(plan: Plan, requested: RequestedContext, as_requested: int | None) -> str | None:
    rows = largest_batch(plan.profile, context_of(plan.settings)).outputs
    if requested.outputs is None or rows is None or requested.outputs >= rows:
        return None
    known = "" if as_requested is None else f"; the prediction for that is {format_bytes(as_requested)}"
    return f"the engine keeps the logits of {requested.outputs} tokens per batch, the plan counts {rows}{known}"


def why_process(
    item: Literal["mapped", "own", "prompt_cache"],
    plan: Plan,
    predicted: int,
    measured: int,
    buffers: tuple[Buffer, ...],
) -> str | None:
    """Likely cause of a difference in a process's memory; None if unknown."""
    if item == "prompt_cache":
        return "it fills with requests" if measured < predicted else "the engine exceeded its limit"
    if item == "mapped":
        if measured < predicted:
            return "pages that were not accessed yet or were evicted are not resident"
        return "it includes the program's shared libraries"
    if measured < predicted:
        allowed = format_bytes(TRAITS[plan.settings.engine].process_bytes)
        reasons = [f"the plan allows {allowed} for the program itself, more than it needs"]
        if plan.settings.cache_ram_bytes:
            reasons.append("the prompt cache fills with requests")
        if any(buffer.compute_bytes for buffer in buffers):
            reasons.append("compute buffers become resident with the first long prompt")
        return "; ".join(reasons)
    if not plan.settings.mmap:
        return "buffers for reading the file are freed slowly"
    return None
