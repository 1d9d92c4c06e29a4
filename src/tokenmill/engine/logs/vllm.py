"""Parses vLLM's log (V1 and V0): memory of each worker, load progress, and errors.

Sizes are rounded to hundredths of GiB. A worker's rank is its GPU; lines without a rank are about the first. vLLM uses
all of the memory that it reports as available for the KV cache.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.logs import faults
from tokenmill.engine.logs.faults import Pattern
from tokenmill.engine.logs.lines import LogLine, lines
from tokenmill.engine.logs.parsed import EngineLog, Hint, LogFault, Phase, RequestedContext, latest
from tokenmill.units import GIB

_START = re.compile(r"vLLM API server version |\bversion +\d+\.\d+\.\d+")
_BUILD = re.compile(r"(?:API server version |\bversion +|LLM engine \(v)(\d+\.\d+\.\d+[\w.+-]*)")
_RANK = re.compile(r"(?:_TP|rank=|-)(\d+)$")
_WEIGHTS = re.compile(r"(?:Model loading|Loading model weights) took ([\d.]+) (GiB|GB)")  # "GB" means GiB
_AVAILABLE = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB|reserved for KV Cache is (-?[\d.]+)GiB")
_EXPLICIT = re.compile(r"(?:Explicitly set|Auto set) \(([\d.]+)/[\d.]+\) GiB for KV cache")
_ACTIVATIONS = re.compile(r"PyTorch activation peak memory takes ([\d.]+)GiB")
_TOKENS = re.compile(r"(GPU|CPU) KV cache size: ([\d,]+) tokens")
_MAXIMUM = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_GRAPHS = re.compile(r"Graph capturing finished in .* took (-?[\d.]+) GiB")
_SHARDS = re.compile(r"Loading (?:\w+ )?(?:safetensors|pt|fastsafetensors|bin)? ?checkpoint shards: +(\d+)% ")
_CAPTURE = re.compile(r"Capturing (?:CUDA|cuda) ?graphs? ?.*?: +(\d+)%")
_CPU = re.compile(r"device_config=cpu\b|\bCPU KV cache size|for KV cache on node")
_PHASES: tuple[tuple[re.Pattern[str], Phase, str | None], ...] = (
    (re.compile(r"Application startup complete"), "ready", None),
    (re.compile(r"Warming up model|Starting vLLM (?:API )?server|init engine .* took"), "warming", "warm-up run"),
    (re.compile(r"KV cache size|Available KV cache memory|for KV cache on node"), "context", "KV cache"),
    (re.compile(r"Dynamo bytecode|Compiling a graph|torch\.compile|compile range"), "compiling", "kernels"),
    (re.compile(r"(?:Model loading|Loading weights|Loading model weights) took"), "context", "memory profiling"),
    (re.compile(r"Starting to load model|Using model weights format"), "reading", "weights"),
    (
        re.compile(r"vLLM API server version|Initializing an? (?:V1 )?LLM engine|Resolved architecture"),
        "starting",
        "worker processes",
    ),
)

_MEMORY = "use a smaller --context, a higher --gpu-memory-utilization, or more GPUs with --tensor-parallel"
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "context",
        re.compile(
            r"max seq len \((\d+)\),? \(?([\d.]+) GiB KV cache is needed.*memory \(([\d.]+) GiB\)"
            r"(?:.*maximum model length is (\d+))?"
        ),
        lambda match: (
            f"a context of {match[1]} tokens needs {match[2]} GiB of KV cache, but {match[3]} GiB are available"
            + (f"; {match[4]} tokens would fit" if match[4] else "")
        ),
        _MEMORY,
    ),
    Pattern(
        "context",
        re.compile(r"max seq len \((\d+)\) is larger than the maximum number of tokens .* \((\d+)\)"),
        lambda match: f"the KV cache holds {match[2]} tokens, fewer than the context of {match[1]}",
        _MEMORY,
    ),
    Pattern(
        "vram",
        re.compile(r"No available memory for the cache blocks"),
        lambda _: "the weights leave no memory for the KV cache",
        _MEMORY,
    ),
    Pattern(
        "vram",
        re.compile(
            r"Free memory on device(?: cuda:(?P<gpu>\d+))? \((?P<free>[\d.]+)/[\d.]+ GiB\) .*"
            r"utilization \([\d.]+, (?P<gib>[\d.]+) GiB\)"
        ),
        lambda match: f"{match['free']} GiB of GPU memory are free, but vLLM needs {match['gib']} GiB",
        "nvidia-smi shows the processes that use the rest; or use a lower --gpu-memory-utilization",
        device="gpu",
        gib="gib",
    ),
    Pattern(
        "vram",
        re.compile(r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ [KMG]iB)\. GPU (?P<gpu>\d+)"),
        lambda match: f"GPU {match['gpu']} has no {match['size']} of memory left",
        _MEMORY,
        device="gpu",
    ),
    Pattern(
        "argument",
        re.compile(r"error: unrecognized arguments: (.+)"),
        lambda match: f"vLLM has no flag {match[1]}",
        "it is not the version that the plan is for: check --version and --help",
    ),
    Pattern(
        "architecture",
        re.compile(r"Model architectures? \[?'?([\w., ']+?)'?\]? (?:are|is) not supported"),
        lambda match: f"this version of vLLM does not support the architecture {match[1]}",
        "try a newer version; a failed import above in the log has the same effect",
    ),
    Pattern(
        "missing",
        re.compile(r"(\S+) is not a local folder and is not a valid model identifier"),
        lambda match: f"model not found: {match[1]}",
        "check the path, and in a container its mounts",
    ),
    Pattern(
        "missing",
        re.compile(r"No such file or directory: '(.+?)'"),
        lambda match: f"file not found: {match[1]}",
        "check the path, and in a container its mounts",
    ),
    Pattern(
        "damaged",
        re.compile(r"SafetensorError: (.+)"),
        lambda match: f"a weight file is damaged: {match[1]}",
        "download it again, or compare its checksum",
    ),
    Pattern(
        "port",
        re.compile(r"attempting to bind on address \('[^']*', (\d+)\)"),
        lambda match: f"port {match[1]} is in use",
        "use another --port; ss -ltnp shows the process that uses it",
    ),
    Pattern(
        "port",
        re.compile(r"\[Errno 98\] Address already in use"),
        lambda _: "the port is in use",
        "use another --port; ss -ltnp shows the process that uses it",
    ),
    Pattern(
        "cuda",
        re.compile(r"CUDA error: (.+)"),
        lambda match: f"CUDA: {match[1]}",
        "check dmesg for GPU driver errors",
    ),
    Pattern(
        "assertion",
        re.compile(r"AssertionError:? ?(.*)"),
        lambda match: f"vLLM failed an assertion: {match[1]}".rstrip(": "),
        "search vLLM's issue tracker for it, and keep the log",
    ),
    Pattern(
        "load",
        re.compile(r"EngineCore failed to start|Engine core initialization failed"),
        lambda _: "the model did not load",
        "see the lines above in the log",
    ),
)


def read(text: str) -> EngineLog:
    """Parse the last run in a log."""
    log_lines = last_run(list(lines(text)))
    tokens = [match[2] for line in log_lines if (match := _TOKENS.search(line.text))]
    most = next((match for line in log_lines if (match := _MAXIMUM.search(line.text))), None)
    kv_tokens = int(tokens[-1].replace(",", "")) if tokens else None
    if kv_tokens is None and most:
        kv_tokens = round(float(most[2]) * int(most[1].replace(",", "")))
    context = int(most[1].replace(",", "")) if most else None
    return EngineLog(
        build=_build(log_lines),
        buffers=tuple(_buffers(log_lines)),
        kv_tokens=kv_tokens,
        requested=RequestedContext(tokens=context),
        hint=latest(map(hint, log_lines)),
        faults=tuple(problems(log_lines)),
    )


def last_run(log_lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The lines since vLLM last started."""
    starts = [index for index, line in enumerate(log_lines) if _START.search(line.text)]
    return log_lines[starts[-1] :] if starts else log_lines


def hint(line: LogLine) -> Hint | None:
    """The load progress in one line; None if it has none."""
    if match := _SHARDS.search(line.text):
        return Hint("reading", int(match[1]) / 100, "weights")
    if match := _CAPTURE.search(line.text):
        return Hint("warming", int(match[1]) / 100, "CUDA graphs")
    return next((Hint(phase, None, detail) for regex, phase, detail in _PHASES if regex.search(line.text)), None)


def problems(log_lines: Sequence[LogLine]) -> Iterator[LogFault]:
    """The errors, the cause first."""
    return faults.found(log_lines, PATTERNS)


def _build(log_lines: Iterable[LogLine]) -> str | None:
    return next((match[1] for line in log_lines if (match := _BUILD.search(line.text))), None)


def _buffers(log_lines: Sequence[LogLine]) -> Iterator[Buffer]:
    on_cpu = any(_CPU.search(line.text) for line in log_lines)
    found: dict[str, Buffer] = {}

    def put(line: LogLine, column: str, gib: str) -> None:
        rank = _RANK.search(line.process or "")
        name = "CPU" if on_cpu else f"CUDA{int(rank[1]) if rank else 0}"
        buffer = found.get(name, Buffer(name))
        size: dict[str, Any] = {column: max(0, round(float(gib) * GIB))}
        found[name] = replace(buffer, **size)

    for line in log_lines:
        if match := _WEIGHTS.search(line.text):
            put(line, "model_bytes", match[1])
        if match := _AVAILABLE.search(line.text):
            put(line, "context_bytes", match[1] or match[2])
        if match := _EXPLICIT.search(line.text):
            put(line, "context_bytes", match[1])
        if match := _ACTIVATIONS.search(line.text):
            put(line, "compute_bytes", match[1])
        if match := _GRAPHS.search(line.text):
            put(line, "compute_bytes", match[1])
    return iter(found.values())
