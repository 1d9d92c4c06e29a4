"""Parses engine logs: build, buffer sizes, load progress, faults, timings.

Pure functions of text. Incomplete logs, of an engine that is still loading or has failed, are parsed as far as they go.
"""

from tokenmill.engine.engine import EngineKind
from tokenmill.engine.logs import ik_llama, llama_cpp, vllm
from tokenmill.engine.logs.lines import LogLine, lines
from tokenmill.engine.logs.parsed import EngineLog, FaultKind, Hint, LogFault, Phase, RequestedContext, Timing

__all__ = [
    "EngineLog",
    "FaultKind",
    "Hint",
    "LogFault",
    "LogLine",
    "Phase",
    "RequestedContext",
    "Timing",
    "hint",
    "lines",
    "read",
]


def read(kind: EngineKind, text: str) -> EngineLog:
    """Parse the last run in an engine's log."""
    if kind == "vllm":
        return vllm.read(text)
    return ik_llama.read(text) if kind == "ik_llama" else llama_cpp.read(text)


def hint(kind: EngineKind, line: LogLine) -> Hint | None:
    """The load progress in one line; None if it has none."""
    return vllm.hint(line) if kind == "vllm" else llama_cpp.hint(line)
