"""Command lines for llama.cpp's llama-server: the current version and that of the winter of 2025/26."""

from tokenmill.launch.dialect import (
    CommandLine,
    add_cache_flags,
    add_load_flags,
    add_numa_flags,
    add_placement_flags,
    add_serve_flags,
    offload_floor,
    visible_gpus,
)
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.speculation import add_speculation
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import Command, Plan
from tokenmill.units import MIB, format_bytes

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
DEFAULT_CHECKPOINTS = 32  # --ctx-checkpoints, per slot
OUTPUT_FIRST = True  # -ngl counts the output as the last entry


def spell(plan: Plan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet) -> Command:
    """The llama-server command for a plan."""
    line = CommandLine(flags, [binary or "llama-server"])
    add_serve_flags(line, plan, model, host, port)
    add_cache_flags(line, plan, CACHE_TYPES)
    add_load_flags(line, plan)
    if not plan.settings.repack:
        line.add("--no-repack")
    if plan.settings.moe_cache_bytes:
        line.add("--moe-cache-mib", plan.settings.moe_cache_bytes // MIB)
    _limit_checkpoints(line, plan)
    _place(line, plan)
    add_speculation(line, plan)
    add_numa_flags(line, plan)
    line.add_if_known("--jinja")
    line.add_if_known("--metrics")
    line.env |= visible_gpus(plan)
    floor = offload_floor(plan)
    if floor is not None:
        line.env["GGML_OP_OFFLOAD_MIN_BATCH"] = str(floor)
        line.note(
            f"GGML_OP_OFFLOAD_MIN_BATCH={floor}: by default llama.cpp copies the experts to the GPU at every decode "
            "step with 32 or more sequences"
        )
    return line.done()


def _limit_checkpoints(line: CommandLine, plan: Plan) -> None:
    """Limit the copies of recurrent states that the server keeps of each slot to the free host memory."""
    each = sum(layer.state_bytes for layer in plan.profile.cache if layer.kind == "recurrent")
    host = plan.memory.get(host_tier(plan.machine))
    if not each or host is None or host.capacity_bytes is None or not line.flags.has("--ctx-checkpoints"):
        return
    free = max(0, host.capacity_bytes - host.used_bytes)
    count = min(DEFAULT_CHECKPOINTS, free // (each * plan.settings.sequences))
    if count < DEFAULT_CHECKPOINTS:
        line.add("--ctx-checkpoints", count)
        line.note(
            f"--ctx-checkpoints {count}: by default the server keeps up to {DEFAULT_CHECKPOINTS} copies of each slot's"
            f" recurrent states in host memory, {format_bytes(each)} each, which would not fit"
        )


def _place(line: CommandLine, plan: Plan) -> None:
    """Own fit, or an explicit placement: llama.cpp does not fit if -ngl, -ts, -ot or -ncmoe is given."""
    if not plan.goal.own_fit or plan.goal.cpu_only:
        if line.flags.has("--fit"):
            line.add("--fit", "off")
        add_placement_flags(line, plan, output_first=OUTPUT_FIRST)
        return
    line.add("--fit", "on")
    if plan.goal.fit_margin_bytes:
        line.add("--fit-target", ",".join(str(margin // MIB) for margin in plan.goal.fit_margin_bytes))
    line.note("--fit on: llama.cpp places layers itself and assumes that host memory is unlimited")
