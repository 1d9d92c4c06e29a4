"""Command lines for ik_llama.cpp's llama-server."""

from tokenmill.launch.dialect import (
    CommandLine,
    add_cache_flags,
    add_load_flags,
    add_numa_flags,
    add_placement_flags,
    add_serve_flags,
    visible_gpus,
)
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.layers import ALL_LAYERS
from tokenmill.launch.speculation import add_speculation
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.plan import Command, Plan
from tokenmill.units import MIB

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q8_kv", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")
OUTPUT_FIRST = False  # -ngl counts only layers; the output is on a GPU if -ngl is larger than their number


def spell(plan: Plan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet) -> Command:
    """The ik_llama.cpp server command for a plan."""
    line = CommandLine(flags, [binary or "llama-server"])
    add_serve_flags(line, plan, model, host, port)
    add_cache_flags(line, plan, CACHE_TYPES)
    add_load_flags(line, plan)
    options = plan.settings.ik or TRAITS[plan.settings.engine].ik or IkOptions()
    if plan.settings.repack or options.rtr:
        line.add("--run-time-repack")
    if any(layer.kind == "latent" for layer in plan.profile.cache):
        line.add("-mla", options.mla)
        if options.amb_mib:
            line.add("-amb", options.amb_mib)
    if plan.profile.experts is not None:
        _experts(line, options)
    _place(line, plan)
    add_speculation(line, plan)
    add_numa_flags(line, plan)
    line.add_if_known("--jinja")
    line.add_if_known("--metrics")
    line.env |= visible_gpus(plan)
    return line.done()


def _experts(line: CommandLine, options: IkOptions) -> None:
    """Add the flags for fused expert operations."""
    if not options.fmoe:
        line.add("-no-fmoe")
    elif line.flags.has("-fmoe"):
        line.add("-fmoe")  # current versions fuse by default
    if options.muge:
        line.add("-muge")
    else:
        line.note(
            "-muge and --merge-qkv are off: they copy tensors while loading, which has made a machine with little free "
            "memory swap until it crashed"
        )


def _place(line: CommandLine, plan: Plan) -> None:
    """Own fit, or an explicit placement: --fit rejects -ot, -cmoe and -ncmoe, but needs -ngl for all layers."""
    if not plan.goal.own_fit or plan.goal.cpu_only:
        add_placement_flags(line, plan, output_first=OUTPUT_FIRST)
        return
    line.add("--n-gpu-layers", ALL_LAYERS)
    line.add("--fit")
    margins = [margin // MIB for margin in plan.goal.fit_margin_bytes]
    if margins:
        line.add("--fit-margin", margins[0])
    others = [(gpu, margin) for gpu, margin in enumerate(margins) if margin != margins[0]]
    if others:
        line.add("--gpu-fit-margin", ",".join(f"{gpu},{margin}" for gpu, margin in others))
        line.note("--fit-margin takes one number; --gpu-fit-margin sets other margins per GPU")
    line.note("-ngl 999 with --fit does not place layers; versions before August 2026 use no GPU without it")
