"""Recognizes errors in engine logs, line by line; each has a message and a hint.

`GGML` is the table of patterns for llama.cpp and ik_llama.cpp; vllm.py has its own. The first fatal error is the cause;
the errors after it (cannot create context, exiting) are consequences.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tokenmill.engine.logs.lines import LogLine
from tokenmill.engine.logs.parsed import FaultKind, LogFault
from tokenmill.units import GIB, MIB, format_bytes

# Prefilter: every line that a pattern matches contains one of these words, and most lines of a log do not.
_SUSPECT = (
    "error",
    "fail",
    "insufficient",
    "unknown",
    "invalid",
    "unexpected",
    "not within",
    "not supported",
    "not a ",
    "is needed",
    "larger",
    "no such",
    "no available",
    "out of memory",
    "less than",
    "couldn",
    "unable",
    "attempting",
    "assert",
    "segmentation",
    "illegal",
    "aborted",
)

LESS_VRAM = "use a smaller --context or --ubatch, fewer experts on that GPU, or a larger --margin"
MEMLOCK = "set ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1:-1 for a container"


@dataclass(frozen=True, slots=True)
class Pattern:
    """An error line, its message and its hint."""

    kind: FaultKind
    regex: re.Pattern[str]
    message: Callable[[re.Match[str]], str]
    hint: str | None = None
    fatal: bool = True
    device: str | None = None  # regex group with the index of the GPU
    mib: str | None = None  # regex group with a size in MiB
    bytes: str | None = None  # regex group with a size in bytes
    gib: str | None = None  # regex group with a size in GiB


def _message(text: str) -> Callable[[re.Match[str]], str]:
    """Format a message with the groups of the match."""
    return lambda match: text.format(*match.groups(), **match.groupdict())


def _message_with_size(text: str, unit: int, group: str) -> Callable[[re.Match[str]], str]:
    """Format a message with `{size}` from one group."""

    def message(match: re.Match[str]) -> str:
        size = format_bytes(round(float(match[group]) * unit))
        return text.format(size=size, **match.groupdict())

    return message


def found(lines: Iterable[LogLine], patterns: Iterable[Pattern]) -> Iterator[LogFault]:
    """Errors in log order, without duplicates; unspecific ones only if no fatal error precedes them."""
    table = tuple(patterns)
    seen: set[tuple[str, str]] = set()
    fatal = False
    for line in lines:
        lower = line.text.lower()
        if not any(word in lower for word in _SUSPECT):
            continue
        fault = next((fault for pattern in table if (fault := _match(line, pattern))), None)
        if fault is None or (fault.kind, fault.message) in seen:
            continue
        if fatal and fault.kind in ("load", "crash", "assertion"):
            continue
        seen.add((fault.kind, fault.message))
        fatal = fatal or fault.fatal
        yield fault


def _match(line: LogLine, pattern: Pattern) -> LogFault | None:
    match = pattern.regex.search(line.text)
    if match is None:
        return None
    size = None
    for name, unit in ((pattern.mib, MIB), (pattern.bytes, 1), (pattern.gib, GIB)):
        size = round(float(match[name]) * unit) if name else size
    device = int(match[pattern.device]) if pattern.device and match[pattern.device] else None
    return LogFault(pattern.kind, pattern.message(match), line.text.strip(), pattern.hint, pattern.fatal, device, size)


GGML: tuple[Pattern, ...] = (
    Pattern(
        "vram",
        re.compile(r"allocating (?P<mib>[\d.]+) MiB on device (?P<gpu>\d+): cudaMalloc failed: out of memory"),
        _message_with_size("GPU {gpu} has no {size} of memory left", MIB, "mib"),
        LESS_VRAM,
        device="gpu",
        mib="mib",
    ),
    Pattern(
        "vram",
        re.compile(r"failed to allocate (?:CUDA|ROCm|Vulkan|SYCL)(?P<gpu>\d+) buffer of size (?P<bytes>\d+)"),
        _message_with_size("GPU {gpu} has no {size} of memory left", 1, "bytes"),
        LESS_VRAM,
        device="gpu",
        bytes="bytes",
    ),
    Pattern(
        "vram",
        re.compile(r"(?:CUDA|ROCm) error: out of memory"),
        _message("a GPU ran out of memory during computation"),
        f"{LESS_VRAM}; some buffers grow with the context and are not in the log",
    ),
    Pattern(
        "memory",
        re.compile(r"failed to allocate (?:CPU\w* )?buffer of size (?P<bytes>\d+)"),
        _message_with_size("the system could not allocate {size} of memory", 1, "bytes"),
        "use a smaller --context, fewer --sequences, or --mmap",
        bytes="bytes",
    ),
    Pattern(
        "memory",
        re.compile(r"insufficient memory \(attempted to allocate (?P<mib>[\d.]+) MB\)"),
        _message_with_size("the system could not allocate {size} of memory", MIB, "mib"),
        "use a smaller --context, fewer --sequences, or --mmap",
        mib="mib",
    ),
    Pattern(
        "memory",
        re.compile(r"failed to allocate (?P<mib>[\d.]+) MiB of pinned memory"),
        _message_with_size("the driver could not pin {size} of host memory: copies to the GPU are slower", MIB, "mib"),
        "allow more locked memory (ulimit -l unlimited), or set GGML_CUDA_NO_PINNED=1",
        fatal=False,
        mib="mib",
    ),
    Pattern(
        "mlock",
        re.compile(r"failed to mlock (?P<bytes>\d+)-byte buffer \(after previously locking (?P<locked>\d+)"),
        lambda match: (
            f"only {format_bytes(int(match['locked']))} of the weights are locked in memory: locking the next "
            f"{format_bytes(int(match['bytes']))} was refused, so the rest can be evicted or swapped"
        ),
        MEMLOCK,
        fatal=False,
        bytes="bytes",
    ),
    Pattern(
        "mmap",
        re.compile(r"mmap failed: (.+)"),
        _message("cannot map the model file: {0}"),
        "set ulimit -v unlimited, increase vm.max_map_count, or use --no-mmap",
    ),
    Pattern(
        "argument",
        re.compile(r"error: (?:invalid|unknown) argument: (\S+)"),
        _message("the engine has no flag {0}"),
        "it is not the version that the plan is for: check --version and --help",
    ),
    Pattern(
        "architecture",
        re.compile(r"unknown (?:model )?architecture:? '?([\w.-]+)'?"),
        _message("the engine does not support the architecture {0}"),
        "try a newer build",
    ),
    Pattern(
        "missing",
        re.compile(r"failed to open (?:GGUF file )?'?(.+?)'? ?(?:\(|: )No such file or directory"),
        _message("file not found: {0}"),
        "check the path, and in a container its mounts",
    ),
    Pattern(
        "missing",
        re.compile(r"failed to open (?:GGUF file )?'?(.+?)'? ?(?:\(|: )Permission denied"),
        _message("no permission to read {0}"),
        "check its owner and mode; in a container also the SELinux label (:z)",
    ),
    Pattern(
        "damaged",
        re.compile(r"tensor '([^']+)' data is not within the file bounds"),
        _message("the file ends before {0}: it is truncated or damaged"),
        "download it again, or compare its checksum",
    ),
    Pattern(
        "damaged",
        re.compile(r"invalid magic characters?:? '?(.{1,4})"),
        _message("the file is not a GGUF file"),
        "it may be a split of another model, an HTML error page or an unfinished download",
    ),
    Pattern(
        "damaged",
        re.compile(r"unexpectedly reached end of file"),
        _message("the file is truncated"),
        "download it again, or compare its checksum",
    ),
    Pattern(
        "port",
        re.compile(r"couldn'?t bind (?:HTTP server socket|to server socket).*?port[:=] ?\"?(\d+)"),
        _message("port {0} is in use"),
        "use another --port; ss -ltnp shows the process that uses it",
    ),
    Pattern(
        "cuda",
        re.compile(r"CUDA error: no kernel image is available"),
        _message("the engine was not built for this GPU"),
        "build it with -DCMAKE_CUDA_ARCHITECTURES=native",
    ),
    Pattern("cuda", re.compile(r"CUDA error: (.+)"), _message("CUDA: {0}"), "check dmesg for GPU driver errors"),
    Pattern(
        "cuda",
        re.compile(r"ggml_cuda_init: failed to initialize CUDA: (.+)"),
        _message("CUDA initialization failed: {0}"),
        "check that nvidia-smi works",
        fatal=False,
    ),
    Pattern(
        "assertion",
        re.compile(r"GGML_ASSERT(?:\(|: )(.+?)\)? ?(?:failed)?$"),
        _message("the engine failed an assertion: {0}"),
        "search the engine's issue tracker for it, and keep the log",
    ),
    Pattern(
        "crash",
        re.compile(r"^(Segmentation fault|Illegal instruction|Aborted|Bus error)"),
        lambda match: f"the engine crashed: {match[1].lower()}",
        "search the engine's issue tracker for it, and keep the log",
    ),
    Pattern(
        "load",
        re.compile(r"(?:failed to load model|unable to load model|failed to create.?context)"),
        _message("the model did not load"),
        "see the lines above in the log, or increase its verbosity",
    ),
)
