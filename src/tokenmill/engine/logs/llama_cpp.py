"""Parses the log of llama.cpp's server; most of it applies to forks.

Since 2026 llama-server logs buffer sizes only with `--verbosity 4`. `fit_params` parses them; `normalized` converts the
formats of other versions for it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenmill.engine import fit_params
from tokenmill.engine.logs import faults
from tokenmill.engine.logs.lines import LogLine, lines
from tokenmill.engine.logs.parsed import EngineLog, Hint, LogFault, Phase, RequestedContext, Timing, latest
from tokenmill.units import MIB, format_bytes

# First line of a run; a log may contain several.
_START = re.compile(r"^(?:srv +init: initializing \.\.\.|main: build = |build info \||build: \d+ \(|version: \d+ \()")
_BUILDS = (
    re.compile(r"^build info \|.*\bbuild=(\d+) commit=\"(\w+)\""),
    re.compile(r"\bbuild(?: =|:)? (\d+) \((\w+)\)"),
    re.compile(r"^version: (\d+) \((\w+)\)"),
    re.compile(r"build_info: b(\d+)-(\w+)"),
)
_PHASES: tuple[tuple[re.Pattern[str], Phase, str | None], ...] = (
    (re.compile(r"server is listening on|^srv +\w+: listening on |^HTTP server listening"), "ready", None),
    (re.compile(r"^(?:srv +\w+: |main: )?model loaded\b"), "ready", None),
    (re.compile(r"warming up the model"), "warming", "warm-up run"),
    (
        re.compile(
            r"^(?:llama_context: constructing|llama_new_context_with_model: n_ctx|llama_init_from_model: n_ctx)"
        ),
        "context",
        "KV cache and compute buffers",
    ),
    (
        re.compile(r"load_tensors: (?:loading|offload|ggml ctx size)|^llama_model_loader: |load_model: loading model"),
        "reading",
        "weights",
    ),
)
_DOTS = re.compile(r"^\.{2,}$")  # one dot per percent
_MODEL_BUFFER = re.compile(r"load_tensors: +(\S+) +(?:model )?buffer size = +([\d.,]+) MiB")
_STATE = re.compile(r"^(\w+:\s+\w+ )(?:\w+ )*state (buffer size)")
_COMMA = re.compile(r"(\d),(\d+ MiB)")
_REQUESTED = re.compile(r"^llama(?:_context|_new_context_with_model|_init_from_model): (\w+) += (\w+)")
_SLOT = re.compile(r"\bid +(\d+) \| task (\d+)|id_slot=(\d+) id_task=(\d+)")
_RATE = r"(?: *\( *[\d.]+ ms per token, +([\d.]+) tokens per second)?"
_PROMPT = re.compile(r"prompt eval time += +([\d.]+) ms / +(\d+) tokens" + _RATE)
_DECODE = re.compile(r"(?<!prompt )eval time += +([\d.]+) ms / +(\d+) (?:tokens|runs)" + _RATE)
_CACHED = re.compile(r"(?:kv cache rm|memory_seq_rm) \[(\w+), end\)(?:.*\bp0=(\d+))?")
_TOTALS = re.compile(r"^llama_(?:print_timings|perf)")  # totals of the process, logged when it exits
_PROMPT_CACHE = re.compile(r"cache state: \d+ prompts, ([\d.]+) MiB")
_MAPPED = re.compile(r"\b(?:mmap = (true|false)|load_mode = (\S+?)\))")


def read(text: str) -> EngineLog:
    """Parse the last run in a log."""
    log_lines = last_run(list(lines(text)))
    buffers = fit_params.parse_log(normalized(log_lines))
    requested = _requested(log_lines)
    return EngineLog(
        build=_build(log_lines),
        buffers=buffers,
        output_bytes=fit_params.parse_output(normalized(log_lines)) if _has_output_buffer(log_lines) else None,
        prompt_cache_bytes=_prompt_cache(log_lines),
        kv_tokens=requested.tokens,
        requested=requested,
        hint=latest(map(hint, log_lines)),
        faults=tuple(problems(log_lines)),
        timings=tuple(timings(log_lines)),
        mapped=_mapped(log_lines),
    )


def last_run(log_lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The lines since the engine last started."""
    starts = [index for index, line in enumerate(log_lines) if _START.search(line.text)]
    return log_lines[starts[-1] :] if starts else log_lines


def hint(line: LogLine) -> Hint | None:
    """The load progress in one line; None if it has none."""
    if _DOTS.match(line.text):
        return Hint("reading", min(1.0, len(line.text) / 100), "weights")
    if match := _MODEL_BUFFER.search(line.text):
        size = format_bytes(round(float(match[2].replace(",", ".")) * MIB))
        return Hint("reading", None, f"{size} into {match[1]}")
    return next((Hint(phase, None, detail) for regex, phase, detail in _PHASES if regex.search(line.text)), None)


def problems(log_lines: Sequence[LogLine]) -> Iterator[LogFault]:
    """The errors, the cause first."""
    copies = any("pipeline parallelism enabled (n_copies=4)" in line.text for line in log_lines)
    for fault in faults.found(log_lines, faults.GGML):
        if fault.kind == "vram" and copies:
            why = "buffers are allocated four times for pipeline parallelism: build with -DGGML_SCHED_MAX_COPIES=1"
            yield LogFault(
                fault.kind,
                fault.message,
                fault.line,
                f"{why}; or {fault.hint}",
                fault.fatal,
                fault.device,
                fault.needed_bytes,
            )
        else:
            yield fault


def timings(log_lines: Iterable[LogLine]) -> Iterator[Timing]:
    """Timings of the answered requests, with cached tokens if the log has them."""
    slot = None
    task = None
    prompt: re.Match[str] | None = None
    cached: dict[int, int] = {}
    for line in log_lines:
        if _TOTALS.search(line.text):
            continue
        if ids := _SLOT.search(line.text):
            slot = int(ids[1] or ids[3])
            task = int(ids[2] or ids[4])
        if (match := _CACHED.search(line.text)) and task is not None:
            start = match[2] or match[1]
            if start.isdigit():
                cached.setdefault(task, int(start))  # logged for every batch of a long prompt
        if match := _PROMPT.search(line.text):
            prompt = match
        elif (match := _DECODE.search(line.text)) and prompt is not None:
            found = None if task is None else cached.get(task)
            yield Timing(
                int(prompt[2]),
                float(prompt[1]) / 1000,
                _number(prompt[3]),
                int(match[2]),
                float(match[1]) / 1000,
                _number(match[3]),
                found,
                slot,
                task,
            )
            prompt = None


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def normalized(log_lines: Iterable[LogLine]) -> str:
    """Buffer lines in the format that `fit_params` parses: decimal points, and compressed states as recurrent ones."""
    sizes = (line.text for line in log_lines if "buffer size" in line.text)
    return "\n".join(_COMMA.sub(r"\1.\2", _STATE.sub(r"\1RS \2", text)) for text in sizes)


def _has_output_buffer(log_lines: Iterable[LogLine]) -> bool:
    return any("output buffer size" in line.text for line in log_lines)


def _build(log_lines: Iterable[LogLine]) -> str | None:
    for line in log_lines:
        for regex in _BUILDS:
            if (match := regex.search(line.text)) and match[1] != "0":
                return f"b{match[1]} ({match[2]})"
    return None


def _requested(log_lines: Iterable[LogLine]) -> RequestedContext:
    values: dict[str, str] = {}
    for line in log_lines:
        if match := _REQUESTED.match(line.text):
            values.setdefault(match[1], match[2])  # a draft model's context comes second

    def number(name: str) -> int | None:
        value = values.get(name, "")
        return int(value) if value.isdigit() else None

    unified = values.get("kv_unified")
    return RequestedContext(
        number("n_ctx"),
        number("n_seq_max"),
        number("n_ubatch"),
        number("n_outputs_max"),
        None if unified is None else unified in ("true", "1"),
    )


def _prompt_cache(log_lines: Iterable[LogLine]) -> int | None:
    sizes = [match[1] for line in log_lines if (match := _PROMPT_CACHE.search(line.text))]
    return round(float(sizes[-1]) * MIB) if sizes else None


def _mapped(log_lines: Iterable[LogLine]) -> bool | None:
    for line in log_lines:
        if "load_tensors: loading" in line.text and (match := _MAPPED.search(line.text)):
            return match[1] == "true" if match[1] else "mmap" in match[2]
    return None
