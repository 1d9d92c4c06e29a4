"""Flags for speculative decoding: prediction layers or a draft model, in every dialect, and how they are read back.

llama.cpp            --spec-type draft-mtp, or draft-simple with --spec-draft-model
ik_llama.cpp         --spec-type mtp:n_max=N, or --model-draft; until spring 2026 -mtp with --draft-max
"""

import re

from tokenmill.launch.dialect import CommandLine, device_names
from tokenmill.launch.layers import ALL_LAYERS
from tokenmill.launch.parse.parsed import ProgramOptions
from tokenmill.planner.goal import Speculation
from tokenmill.planner.memory.drafting import drafter
from tokenmill.planner.plan import Plan

DEFAULT_TOKENS = 3  # --spec-draft-n-max of llama.cpp
MODEL_FLAGS = ("--spec-draft-model", "--model-draft", "--spec-draft-hf", "--hf-repo-draft")


def add_speculation(line: CommandLine, plan: Plan) -> None:
    """Add the flags of a plan's speculative decoding, if it has any."""
    tokens = plan.settings.draft_tokens
    if tokens is None:
        return
    if plan.settings.mtp:
        _add_mtp(line, tokens)
        return
    if line.flags.has("--spec-draft-model"):
        line.add("--spec-type", "draft-simple")
        line.add("--spec-draft-model", plan.settings.draft_model)
        line.add("--spec-draft-n-max", tokens)
    else:
        line.add("--model-draft", plan.settings.draft_model)
        line.add("--draft-max", tokens)
    tier = drafter(plan.placement, "dram")
    device = device_names(plan).get(tier)
    line.add("-ngld", 0 if device is None else ALL_LAYERS)
    if device is not None and len(plan.placement.gpus) > 1:
        line.add("-devd", device)


def _add_mtp(line: CommandLine, tokens: int) -> None:
    if line.flags.has("-mtp"):
        line.add("-mtp")
        line.add("--draft-max", tokens)
    elif line.flags.has("--mla-use"):
        line.add("--spec-type", f"mtp:n_max={tokens}")
    else:
        line.add("--spec-type", "draft-mtp")
        line.add("--spec-draft-n-max", tokens)


def read_speculation(options: ProgramOptions) -> Speculation | None:
    """The speculative decoding of a command: prediction layers, or a draft model that is not read."""
    kinds = options.last("--spec-type") or ""
    text = options.last("--spec-draft-n-max") or options.last("--draft-max") or ""
    found = re.search(r"n_max=(\d+)", kinds) or re.fullmatch(r"(\d+)", text)
    tokens = max(1, int(found[1])) if found else DEFAULT_TOKENS
    if options.has("-mtp") or re.search(r"(^|,|draft-)mtp\b", kinds):
        return Speculation(tokens)
    return None


def draft_model(options: ProgramOptions) -> str | None:
    """The draft model that a command names; None without one."""
    return next((value for name in MODEL_FLAGS if (value := options.last(name))), None)
