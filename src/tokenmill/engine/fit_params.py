"""Buffer sizes that llama.cpp and ik_llama.cpp report, parsed from their output.

`llama-fit-params --fit-print on` prints one line per device, llama.cpp prints a table when it exits, and both llama.cpp
and ik_llama.cpp (with `--dry-run`) log every buffer at startup. Sizes are rounded to MiB or hundredths of MiB.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenmill.errors import EngineError
from tokenmill.units import MIB


@dataclass(frozen=True, slots=True)
class Buffer:
    """Sizes of one buffer type, such as CPU, CPU_REPACK, CUDA0 or CUDA_Host; "Host" is the sum of host buffers."""

    name: str
    model_bytes: int = 0
    context_bytes: int = 0
    compute_bytes: int = 0

    @property
    def gpu(self) -> int | None:
        """Index of the GPU; None for host memory."""
        match = re.fullmatch(r"(?:CUDA|ROCm|Vulkan|SYCL|MUSA)(\d+)", self.name)
        return int(match[1]) if match else None


_FIT_LINE = re.compile(r"^(\w+) (\d+) (\d+) (\d+) *$", re.MULTILINE)
_TABLE_LINE = re.compile(r"\|\s+- (\w+)[^|]*\|[^|]*?=\s*(\d+)\s*\+\s*(\d+)\s*\+\s*(\d+)\)?[^|]*\|")
_LOG_LINE = re.compile(
    r"^\w+:\s+(\w+)\s+(model |KV |RS |compute |output )?buffer size\s*=\s*([\d.]+) MiB", re.MULTILINE
)
_CACHE_LINE = re.compile(r"size\s*=\s*([\d.]+) MiB \(\s*\d+ cells")
_COLUMNS = {"model ": "model_bytes", "KV ": "context_bytes", "RS ": "context_bytes", "compute ": "compute_bytes"}


def parse_fit_print(text: str) -> tuple[Buffer, ...]:
    """Parse `llama-fit-params --fit-print on`: lines of device, model, context and compute MiB."""
    return tuple(
        Buffer(name, int(model) * MIB, int(context) * MIB, int(compute) * MIB)
        for name, model, context, compute in _FIT_LINE.findall(text)
    )


def parse_table(text: str) -> tuple[Buffer, ...]:
    """Parse llama.cpp's memory breakdown table."""
    return tuple(
        Buffer(name, int(model) * MIB, int(context) * MIB, int(compute) * MIB)
        for name, model, context, compute in _TABLE_LINE.findall(text)
    )


def parse_log(text: str) -> tuple[Buffer, ...]:
    """Parse the buffer sizes in a log of llama.cpp or ik_llama.cpp, in log order, without the logits buffer."""
    found: dict[str, Buffer] = {}
    for name, kind, size in _LOG_LINE.findall(text):
        if kind == "output ":
            continue
        buffer = found.get(name, Buffer(name))
        column = _COLUMNS.get(kind or "model ", "model_bytes")
        found[name] = replace(buffer, **{column: getattr(buffer, column) + _bytes(size)})
    return tuple(found.values())


def parse_output(text: str) -> int:
    """Parse the size of the logits buffer in a log."""
    return sum(_bytes(size) for _, kind, size in _LOG_LINE.findall(text) if kind == "output ")


def parse_cache(text: str) -> int:
    """Parse the sizes of the KV caches in llama.cpp's log. Correct in a dry run, where the buffer sizes are 0."""
    return sum(_bytes(size) for size in _CACHE_LINE.findall(text))


def run_fit_params(binary: str, arguments: Sequence[str], *, time_limit_s: float = 120) -> tuple[Buffer, ...]:
    """Run llama-fit-params with llama.cpp's arguments, including the model, and return the buffer sizes."""
    text = _run([binary, *arguments, "--fit-print", "on"], time_limit_s)
    return _found(parse_fit_print(text), binary, text)


def run_dry(binary: str, arguments: Sequence[str], *, time_limit_s: float = 600) -> tuple[Buffer, ...]:
    """Run an ik_llama.cpp server with --dry-run, which really allocates its buffers, and return their sizes."""
    text = _run([binary, *arguments, "--dry-run"], time_limit_s)
    return _found(parse_log(text), binary, text)


def _run(command: Sequence[str], time_limit_s: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=time_limit_s, check=False
        )
    except OSError as error:
        raise EngineError(f"cannot run {command[0]}: {error.strerror}", hint="check the path") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{command[0]} did not finish in {time_limit_s:.0f} s") from error
    if done.returncode:
        raise EngineError(f"{command[0]} failed ({done.returncode})", hint=last_lines(done.stderr or done.stdout))
    return f"{done.stdout}\n{done.stderr}"


def _found(buffers: tuple[Buffer, ...], binary: str, text: str) -> tuple[Buffer, ...]:
    if not buffers:
        raise EngineError(f"{binary} reported no buffer sizes", hint=last_lines(text))
    return buffers


def last_lines(log: str, count: int = 4) -> str | None:
    """The last lines of a log on one line, for the hint of an error; None if it is empty."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or None


def _bytes(mib: str) -> int:
    return round(float(mib) * MIB)
