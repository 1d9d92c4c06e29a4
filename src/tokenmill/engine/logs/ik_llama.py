"""Parses the log of ik_llama.cpp's server, which is llama.cpp's of 2024 with additions.

`CUDA_Split` is one buffer divided between several GPUs. If the log lists the shares of the devices, it is replaced with
a buffer per GPU.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.logs import llama_cpp
from tokenmill.engine.logs.lines import LogLine, lines
from tokenmill.engine.logs.parsed import EngineLog
from tokenmill.units import MIB

SPLIT = "CUDA_Split"
_LISTS = {
    "model_bytes": re.compile(r"model buffer size per device"),
    "context_bytes": re.compile(r"KV cache size per device"),
}
_DEVICE = re.compile(r"^\s*Device (\d+): +([\d.]+) MiB")
_CLOSE = 0.02  # the listed shares are estimates


def read(text: str) -> EngineLog:
    """Parse the last run in a log."""
    log = llama_cpp.read(text)
    log_lines = llama_cpp.last_run(list(lines(text)))
    return replace(log, buffers=divide_split_buffers(log.buffers, log_lines))


def divide_split_buffers(buffers: tuple[Buffer, ...], log_lines: Sequence[LogLine]) -> tuple[Buffer, ...]:
    """Divide split buffers between their GPUs if the log lists the shares."""
    whole = {buffer.name: buffer for buffer in buffers}
    for column, regex in _LISTS.items():
        split = whole.get(SPLIT)
        shares = _shares(log_lines, regex)
        total = getattr(split, column) if split else 0
        if split is None or not total or abs(sum(shares.values()) - total) > _CLOSE * total:
            continue
        for device, size in shares.items():
            name = f"CUDA{device}"
            card = whole.get(name, Buffer(name))
            whole[name] = replace(card, **{column: getattr(card, column) + size})
        nothing: dict[str, Any] = {column: 0}
        whole[SPLIT] = replace(split, **nothing)
    return tuple(buffer for buffer in whole.values() if buffer.name != SPLIT or any(_sizes(buffer)))


def _shares(log_lines: Sequence[LogLine], regex: re.Pattern[str]) -> dict[int, int]:
    shares: dict[int, int] = {}
    for index, line in enumerate(log_lines):
        if regex.search(line.text):
            for following in log_lines[index + 1 :]:
                match = _DEVICE.match(following.text)
                if match is None:
                    break
                shares[int(match[1])] = round(float(match[2]) * MIB)
    return shares


def _sizes(buffer: Buffer) -> tuple[int, int, int]:
    return buffer.model_bytes, buffer.context_bytes, buffer.compute_bytes
