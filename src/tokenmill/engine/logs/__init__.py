"""What engines say in their logs, read into values: build, buffers, progress, faults, timings.

Every function is pure over text. A log is read as far as it goes: of a run that is still loading as well as of one
that failed.
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
    """Everything the last run in an engine's log says."""
    if kind == "vllm":
        return vllm.read(text)
    return ik_llama.read(text) if kind == "ik_llama" else llama_cpp.read(text)


def hint(kind: EngineKind, line: LogLine) -> Hint | None:
    """What one line tells of a load's progress."""
    return vllm.hint(line) if kind == "vllm" else llama_cpp.hint(line)
