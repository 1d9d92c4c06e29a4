"""Splits the log text of engines into plain lines.

Removes colours, carriage returns of progress bars, and the prefixes of journald, containers, llama.cpp and vLLM.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LETTERS: dict[str, Level] = {"T": "debug", "D": "debug", "I": "info", "W": "warning", "E": "error"}
_WORDS: dict[str, Level] = {
    "DEBUG": "debug",
    "VERB": "debug",
    "INFO": "info",
    "WARN": "warning",
    "WARNING": "warning",
    "ERR": "error",
    "ERROR": "error",
    "CRITICAL": "error",
}
# Prefixes of journald, CI and routers: `Jun 18 08:57:40 host name[1]: `, `[42027] `, an ISO time.
_FOREIGN = re.compile(
    r"(?:(?:[A-Z][a-z]{2} +\d+ )?\d\d:\d\d:\d\d +(?:\S+ +)?[\w./-]+:?\[\d+\]: "
    r"|\[\d{4}-\d\d-\d\dT[\d:.]+Z?\] |\[\d+\] )"
)
_LLAMA = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} ([TDIWE]) ")  # minutes, seconds, milliseconds, microseconds
_IK = re.compile(r" ?(VERB|INFO|WARN|ERR) \[ *(\w+)\] ")
_VLLM_PROCESS = re.compile(r"\(([\w.-]+(?: rank=\d+)?) pid=\d+\) ?")
_VLLM = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w.]+:\d+\]|[\w.]+:\d+\]) ?")
_UVICORN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): +")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log without its prefixes."""

    text: str
    level: Level | None = None
    process: str | None = None  # the process, if the engine has several: Worker_TP0, EngineCore


def lines(text: str) -> Iterator[LogLine]:
    """Yield the non-empty lines; each update of a progress bar is a line."""
    for raw in re.split(r"[\r\n]+", _COLOUR.sub("", text)):
        if raw.strip():
            yield line(raw)


def line(raw: str) -> LogLine:
    """Parse one line."""
    rest = raw.rstrip()
    foreign = _FOREIGN.match(rest)
    rest = rest[foreign.end() :] if foreign else rest
    if match := _LLAMA.match(rest):
        return LogLine(rest[match.end() :], _LETTERS[match[1]])
    if match := _IK.match(rest):
        return LogLine(rest[match.end() :], _WORDS[match[1]], match[2])
    process = None
    while match := _VLLM_PROCESS.match(rest):
        process = match[1]
        rest = rest[match.end() :]
    if match := _VLLM.match(rest) or _UVICORN.match(rest):
        return LogLine(rest[match.end() :], _WORDS[match[1]], process)
    return LogLine(rest, None, process)
