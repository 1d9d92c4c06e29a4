"""Converts a plan to an engine's command line (`spell`) and reads a command line back (`launch.parse`)."""

from tokenmill.errors import UsageError
from tokenmill.launch import ik_llama, llama_cpp, vllm
from tokenmill.launch.flag_sets import FlagSet, family, flags_of, stored
from tokenmill.launch.parse.command_line import read_command
from tokenmill.launch.parse.machine_findings import findings_for, free_of
from tokenmill.launch.parse.parsed import Finding, ReadCommand
from tokenmill.launch.parse.placement import to_placement
from tokenmill.launch.parse.versions import possible_versions
from tokenmill.launch.tensor_patterns import patterns, tiers_by_pattern
from tokenmill.planner.plan import Command, Plan

__all__ = [
    "Command",
    "Finding",
    "FlagSet",
    "ReadCommand",
    "findings_for",
    "flags_of",
    "free_of",
    "patterns",
    "possible_versions",
    "read_command",
    "spell",
    "tiers_by_pattern",
    "to_placement",
]

_SPELLERS = {"llama.cpp": llama_cpp.spell, "ik_llama": ik_llama.spell, "vllm": vllm.spell}


def spell(
    plan: Plan,
    *,
    model: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    binary: str | None = None,
    flags: FlagSet | None = None,
) -> Command:
    """Build the command line for a plan.

    flags: the flags of the installed engine version; default: those of the captured build. UsageError or FlagUnknown if
    the engine does not support the plan.
    """
    engine = plan.settings.engine
    if flags is not None and family(flags.dialect) != family(engine):
        raise UsageError(
            f"{flags.version} is {flags.dialect}, but the plan is for {engine}",
            hint=f"plan again with --engine {flags.dialect}",
        )
    write = _SPELLERS[family(engine)]
    return write(plan, model=model, host=host, port=port, binary=binary, flags=flags or stored(engine))
