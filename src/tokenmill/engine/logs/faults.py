"""What goes wrong in engines, told from single lines, each with what to do about it.

A table of patterns; the engines' own modules add theirs. The first line that fits is the cause, what follows it in a
log (cannot create context, exiting) is only its echo.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tokenmill.engine.logs.lines import LogLine
from tokenmill.engine.logs.parsed import FaultKind, LogFault
from tokenmill.units import GIB, MIB, format_bytes

# Every pattern's line has one of these words, most lines of a long log have none, and looking for them is cheap.
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

LESS_VRAM = "a smaller --context or --ubatch, fewer experts on that GPU, or a larger --margin in the plan"
MEMLOCK = "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1:-1 for a container"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A line to look for, and what it means."""

    kind: FaultKind
    regex: re.Pattern[str]
    message: Callable[[re.Match[str]], str]
    hint: str | None = None
    fatal: bool = True
    device: str | None = None  # name of the group that is a GPU's number
    mib: str | None = None  # name of the group that is a size in MiB
    bytes: str | None = None  # name of the group that is a size in bytes
    gib: str | None = None  # name of the group that is a size in GiB


def _says(text: str) -> Callable[[re.Match[str]], str]:
    """The sentence with the match's groups put in."""
    return lambda match: text.format(*match.groups(), **match.groupdict())


def _sized(text: str, unit: int, group: str) -> Callable[[re.Match[str]], str]:
    """The same with `{size}` from one group."""

    def sentence(match: re.Match[str]) -> str:
        size = format_bytes(round(float(match[group]) * unit))
        return text.format(size=size, **match.groupdict())

    return sentence


def found(lines: Iterable[LogLine], patterns: Iterable[Pattern]) -> Iterator[LogFault]:
    """Faults in the order they were said, each once; vague ones only where nothing better was said before."""
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
        _sized("GPU {gpu} has no {size} left", MIB, "mib"),
        LESS_VRAM,
        device="gpu",
        mib="mib",
    ),
    Pattern(
        "vram",
        re.compile(r"failed to allocate (?:CUDA|ROCm|Vulkan|SYCL)(?P<gpu>\d+) buffer of size (?P<bytes>\d+)"),
        _sized("GPU {gpu} has no {size} left", 1, "bytes"),
        LESS_VRAM,
        device="gpu",
        bytes="bytes",
    ),
    Pattern(
        "vram",
        re.compile(r"(?:CUDA|ROCm) error: out of memory"),
        _says("a GPU ran out of memory while it computed"),
        f"{LESS_VRAM}; what grows with the context is in no buffer that the log names",
    ),
    Pattern(
        "memory",
        re.compile(r"failed to allocate (?:CPU\w* )?buffer of size (?P<bytes>\d+)"),
        _sized("the system gave no {size} of memory", 1, "bytes"),
        "a smaller --context, fewer --sequences, or --mmap in place of a copy",
        bytes="bytes",
    ),
    Pattern(
        "memory",
        re.compile(r"insufficient memory \(attempted to allocate (?P<mib>[\d.]+) MB\)"),
        _sized("the system gave no {size} of memory", MIB, "mib"),
        "a smaller --context, fewer --sequences, or --mmap in place of a copy",
        mib="mib",
    ),
    Pattern(
        "memory",
        re.compile(r"failed to allocate (?P<mib>[\d.]+) MiB of pinned memory"),
        _sized("the driver pinned no {size} of host memory: copies to the GPU are slower", MIB, "mib"),
        "more locked memory (ulimit -l unlimited), or GGML_CUDA_NO_PINNED=1 to stop asking",
        fatal=False,
        mib="mib",
    ),
    Pattern(
        "mlock",
        re.compile(r"failed to mlock (?P<bytes>\d+)-byte buffer \(after previously locking (?P<locked>\d+)"),
        lambda match: (
            f"only {format_bytes(int(match['locked']))} of the weights are locked in memory: the next "
            f"{format_bytes(int(match['bytes']))} were refused, and the rest can be dropped or swapped"
        ),
        MEMLOCK,
        fatal=False,
        bytes="bytes",
    ),
    Pattern(
        "mmap",
        re.compile(r"mmap failed: (.+)"),
        _says("the model file could not be mapped: {0}"),
        "ulimit -v unlimited, vm.max_map_count, or load without mmap",
    ),
    Pattern(
        "argument",
        re.compile(r"error: (?:invalid|unknown) argument: (\S+)"),
        _says("the engine has no flag {0}"),
        "it is another version than the command was written for: ask it with --version and --help",
    ),
    Pattern(
        "architecture",
        re.compile(r"unknown (?:model )?architecture:? '?([\w.-]+)'?"),
        _says("this engine does not know the architecture {0}"),
        "a newer build of it does, perhaps",
    ),
    Pattern(
        "missing",
        re.compile(r"failed to open (?:GGUF file )?'?(.+?)'? ?(?:\(|: )No such file or directory"),
        _says("there is no file {0}"),
        "check the path, and in a container what is mounted where",
    ),
    Pattern(
        "missing",
        re.compile(r"failed to open (?:GGUF file )?'?(.+?)'? ?(?:\(|: )Permission denied"),
        _says("{0} may not be read"),
        "check its owner and mode; in a container also the SELinux label (:z)",
    ),
    Pattern(
        "damaged",
        re.compile(r"tensor '([^']+)' data is not within the file bounds"),
        _says("the file ends before {0}: it is cut short or damaged"),
        "pull it again, or compare its checksum",
    ),
    Pattern(
        "damaged",
        re.compile(r"invalid magic characters?:? '?(.{1,4})"),
        _says("the file is no GGUF"),
        "a split of another model, an HTML error page or an unfinished download look like this",
    ),
    Pattern(
        "damaged",
        re.compile(r"unexpectedly reached end of file"),
        _says("the file ends too early"),
        "pull it again, or compare its checksum",
    ),
    Pattern(
        "port",
        re.compile(r"couldn'?t bind (?:HTTP server socket|to server socket).*?port[:=] ?\"?(\d+)"),
        _says("port {0} is in use"),
        "another --port, or see who has it: ss -ltnp",
    ),
    Pattern(
        "cuda",
        re.compile(r"CUDA error: no kernel image is available"),
        _says("the engine was not built for this GPU"),
        "build it with -DCMAKE_CUDA_ARCHITECTURES=native",
    ),
    Pattern("cuda", re.compile(r"CUDA error: (.+)"), _says("CUDA: {0}"), "dmesg shows whether the driver lost the GPU"),
    Pattern(
        "cuda",
        re.compile(r"ggml_cuda_init: failed to initialize CUDA: (.+)"),
        _says("CUDA could not be started: {0}"),
        "nvidia-smi must work first",
        fatal=False,
    ),
    Pattern(
        "assertion",
        re.compile(r"GGML_ASSERT(?:\(|: )(.+?)\)? ?(?:failed)?$"),
        _says("the engine broke off at its own check: {0}"),
        "keep the log and look for it in its tracker",
    ),
    Pattern(
        "crash",
        re.compile(r"^(Segmentation fault|Illegal instruction|Aborted|Bus error)"),
        lambda match: f"the engine crashed: {match[1].lower()}",
        "keep the log and look for it in its tracker",
    ),
    Pattern(
        "load",
        re.compile(r"(?:failed to load model|unable to load model|failed to create.?context)"),
        _says("the model did not load"),
        "its reason stands above in the log, or needs a more talkative one",
    ),
)
