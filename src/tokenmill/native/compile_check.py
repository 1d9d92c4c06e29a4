"""Compiles grammars and JSON schemas in a child process with a memory and a CPU limit.

Neither llguidance nor llama.cpp can be interrupted, and some inputs of a few hundred bytes take gigabytes or overflow
the stack (`allOf` over patterns, deeply nested parentheses). The worker therefore compiles only what this child, which
has loaded the same vocabulary, compiled within the limits. If the child dies, the request is refused and the next
check starts another child.

    python -m tokenmill.native.compile_check VOCAB_SOURCE    one JSON object per line on stdin and stdout
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import TypeAdapter

from tokenmill.engine.engine import Sampling
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, from_wire, to_wire
from tokenmill.native.cdefs import open_running
from tokenmill.native.constraints import CANDIDATE, compiled
from tokenmill.native.model import Model, ModelSettings
from tokenmill.native.vocab import Vocab
from tokenmill.units import MIB, format_bytes

MEMORY_BYTES = 256 * MIB
CPU_S = 10
WALL_S = 120.0  # for a machine so busy that CPU_S of processor time takes longer
START_S = 300.0  # to load the vocabulary
STACK_BYTES = 4 * MIB  # half of the usual stack, so that whatever passes here also fits the worker's threads
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class VocabSource:
    """The model file and the library that the child loads the vocabulary with."""

    model: Path
    library: Path | None = None
    header: Path | None = None


_SOURCE = TypeAdapter(VocabSource)


class CompileCheck:
    """The parent's side. Used by one thread, except `close`."""

    def __init__(self, source: VocabSource) -> None:
        self._source = source
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, sampling: Sampling, context_tokens: int) -> None:
        """RequestRefused where the constraint cannot be compiled within the limits or allows no first token.

        EngineError where the child cannot be started or something else killed it.
        """
        child = self._child or self._start()
        question = {"json_schema": sampling.json_schema, "grammar": sampling.grammar, "context_tokens": context_tokens}
        reply = _ask(child, question, WALL_S)
        if reply is None:
            status = self._end(child)
            if status == -signal.SIGKILL:
                raise EngineError(f"the process that checks the {_kind(sampling)} was killed", hint="retry the request")
            raise RequestRefused(f"the {_kind(sampling)} cannot be compiled: {_cause(status)}", hint=_HINT)
        if "error" in reply:
            raise from_wire(reply["error"])

    def close(self) -> None:
        """Kill the child; may be called from another thread during a check, which then fails."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", __name__, _SOURCE.dump_json(self._source).decode()]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an aborted compile prints a backtrace of Rust's
            env={**os.environ, **_NO_GPU},
        )
        reply = None if self._closed else _read(child, START_S)
        if reply is None or "error" in reply:
            status = self._end(child)
            why = from_wire(reply["error"]).message if reply else _cause(status)
            raise EngineError(f"the process that checks grammars and JSON schemas did not start: {why}")
        self._child = child
        return child

    def _end(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait for a child that died or must die; its exit status."""
        self._child = None
        if child.stdout is not None:
            child.stdout.close()
        if child.stdin is not None:
            with suppress(BrokenPipeError):
                child.stdin.close()
        try:
            return child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return -signal.SIGXCPU


_HINT = "simplify it: fewer alternatives and patterns combined with allOf, smaller bounds, less nesting"


def _kind(sampling: Sampling) -> str:
    return "grammar" if sampling.json_schema is None else "JSON schema"


def _cause(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"it takes more than {CPU_S} s"
    if status == -signal.SIGSEGV:
        return "it is nested too deeply"
    return f"it takes more than {format_bytes(MEMORY_BYTES)} of memory"


def _ask(child: "subprocess.Popen[bytes]", question: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    if child.stdin is None:
        return None
    try:
        child.stdin.write(json.dumps(question).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(child, timeout_s)


def _read(child: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Any] | None:
    """One reply; None: the child died or is too slow. Replies are far smaller than a pipe."""
    if child.stdout is None or not select.select([child.stdout], [], [], timeout_s)[0]:
        return None
    line = child.stdout.readline()
    reply: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return reply


# ---- the child


def _serve(vocab: Vocab, questions: IO[bytes], replies: IO[bytes]) -> None:
    for line in questions:
        asked = json.loads(line)
        sampling = Sampling(json_schema=asked["json_schema"], grammar=asked["grammar"])
        _limit()
        try:
            _compile(vocab, sampling, asked["context_tokens"])
        except TokenmillError as error:
            _reply(replies, {"error": to_wire(error)})
        except MemoryError:
            os.abort()
        else:
            _reply(replies, {"done": True})


def _limit() -> None:
    """Allow the next compile its share of memory and processor time on top of what this process has used."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)
    _soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CPU_S)


def _soft(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _compile(vocab: Vocab, sampling: Sampling, context_tokens: int) -> None:
    """Compile and look for a first token; RequestRefused if there is none."""
    constraint = compiled(vocab, sampling, context_tokens)
    candidates = np.zeros(vocab.n_tokens, CANDIDATE)
    candidates["id"] = np.arange(vocab.n_tokens, dtype=np.int32)
    ffi = vocab.library.ffi
    array = ffi.new("llama_token_data_array *")
    array.data = ffi.cast("llama_token_data *", candidates.ctypes.data)
    array.size = len(candidates)
    array.selected = -1
    array.sorted = False
    constraint.restrict(candidates, array)
    constraint.close()
    if not np.isfinite(candidates["logit"]).any():
        raise RequestRefused(
            f"no answer can satisfy the {_kind(sampling)}", hint="check it for parts that contradict each other"
        )


def _reply(replies: IO[bytes], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _run(source: VocabSource, questions: IO[bytes], replies: IO[bytes]) -> None:
    try:
        library = open_running(source.library, header=source.header)
        vocab = Model.load(library, source.model, ModelSettings(), vocab_only=True).vocab
        compiled(vocab, Sampling(json_schema='{"type": "null"}'), None).close()  # before memory is limited
    except TokenmillError as error:
        _reply(replies, {"error": to_wire(error)})
        return
    _reply(replies, {"ready": True})
    _serve(vocab, questions, replies)


def main() -> None:
    """Check what comes on stdin until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    source = _SOURCE.validate_json(sys.argv[1])
    thread = threading.Thread(target=_run, args=(source, sys.stdin.buffer, replies), daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
