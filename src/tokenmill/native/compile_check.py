"""Compiles grammars and JSON schemas in a child process with a memory and a CPU limit.

llguidance cannot be interrupted, and some inputs of a few hundred bytes take gigabytes or overflow the stack (`allOf`
over patterns, deeply nested parentheses). The worker therefore compiles only what this child, which has the same
vocabulary, compiled within the limits. If the child dies, the request is refused and the next check starts another.

    python -m tokenmill.native.compile_check    a vocabulary, then one grammar a line on stdin; verdicts on stdout
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tokenmill.errors import EngineError, RequestRefused, TokenmillError, from_wire, to_wire
from tokenmill.native.constraints import Tokenizer, TokenTable
from tokenmill.native.grammar import GrammarText
from tokenmill.units import MIB, format_bytes

MEMORY_BYTES = 256 * MIB
CPU_S = 10
WALL_S = 120.0  # for a machine so busy that CPU_S of processor time takes longer
START_S = 300.0  # to read the vocabulary
STACK_BYTES = 4 * MIB  # half of the usual stack, so that whatever passes here also fits the worker's threads
_HINT = "simplify it: fewer alternatives and patterns combined with allOf, smaller bounds, less nesting"


class CompileCheck:
    """The parent's side. Used by one thread, except `close`."""

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        self._table = table
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, grammar: GrammarText) -> None:
        """RequestRefused where the grammar cannot be compiled within the limits or allows no first token.

        EngineError where the child cannot be started or something else killed it.
        """
        child = self._child or self._start()
        reply = _ask(child, json.dumps(asdict(grammar)).encode() + b"\n", WALL_S)
        if reply is None:
            status = self._end(child)
            if status == -signal.SIGKILL:
                raise EngineError("the process that checks grammars and JSON schemas was killed", hint="retry")
            raise RequestRefused(f"the grammar or JSON schema cannot be compiled: {_cause(status)}", hint=_HINT)
        if "error" in reply:
            raise from_wire(reply["error"])

    def close(self) -> None:
        """Kill the child; may be called from another thread during a check, which then fails."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an aborted compile prints a backtrace of Rust's
        )
        table = self._table()
        header = {"lengths": [len(piece) for piece in table.pieces], "ends": table.ends}
        reply = None
        if not self._closed:
            reply = _ask(child, json.dumps(header).encode() + b"\n" + b"".join(table.pieces), START_S)
        if reply is None:
            raise EngineError(
                f"the process that checks grammars and JSON schemas did not start: {_cause(self._end(child))}"
            )
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


def _cause(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"it takes more than {CPU_S} s"
    if status == -signal.SIGSEGV:
        return "it is nested too deeply"
    return f"it takes more than {format_bytes(MEMORY_BYTES)} of memory"


def _ask(child: "subprocess.Popen[bytes]", question: bytes, timeout_s: float) -> dict[str, Any] | None:
    """The reply, which is far smaller than a pipe; None where the child died or is too slow."""
    if child.stdin is None or child.stdout is None:
        return None
    try:
        child.stdin.write(question)
        child.stdin.flush()
    except BrokenPipeError:
        return None
    if not select.select([child.stdout], [], [], timeout_s)[0]:
        return None
    line = child.stdout.readline()
    reply: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return reply


# ---- the child


def _run(questions: IO[bytes], replies: IO[bytes]) -> None:
    header = json.loads(questions.readline())
    pieces = tuple(questions.read(length) for length in header["lengths"])
    tokenizer = Tokenizer(TokenTable(pieces, tuple(header["ends"])))
    tokenizer.compile(GrammarText('{"grammars": [{"json_schema": {"type": "null"}}]}'))  # before memory is limited
    _reply(replies, {"ready": True})
    for line in questions:
        grammar = GrammarText(**json.loads(line))
        _limit()
        try:
            tokenizer.compile(grammar)
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


def _reply(replies: IO[bytes], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def main() -> None:
    """Check what comes on stdin until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_run, args=(sys.stdin.buffer, replies), daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
