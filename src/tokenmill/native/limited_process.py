"""A child process that answers one question at a time within limits of memory and time.

For work on foreign input that cannot be interrupted in this process. The kernel enforces the limits: RLIMIT_AS on what
the child may allocate for one question, RLIMIT_CPU on its processor time; a child that waits or is stopped ends at the
parent's timeout. `LimitedProcess` is the parent's side, `serve` the child's; they exchange one JSON object per line.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.units import format_bytes

_READ_BYTES = 1 << 20
_REAP_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Resource limits of one request to the child process."""

    memory_bytes: int  # on top of what the child has allocated before
    cpu_s: int
    wall_s: float  # for a machine so busy that `cpu_s` of processor time takes longer


class ChildDied(Exception):
    """The child died or had to be killed; the text says which limit it exceeded."""

    def __init__(self, cause: str, *, killed: bool) -> None:
        super().__init__(cause)
        self.killed = killed  # by someone else, such as the kernel's OOM killer: the question is not to blame


class LimitedProcess:
    """`python -m MODULE` with a socket to it; `start` also replaces a dead child. For one thread, except `close`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None before `start` and after its death was noticed."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start a child; returns before it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            both = theirs.fileno()
            command = [sys.executable, "-m", self._module]
            self._child = subprocess.Popen(command, stdin=both, stdout=both, stderr=subprocess.DEVNULL)
        self._socket = ours
        if self._closed:
            self._child.kill()

    def ask(self, question: dict[str, Any], limits: ProcessLimits) -> dict[str, Any]:
        """The child's answer; ChildDied if it exceeds a limit."""
        line = json.dumps({"limits": asdict(limits), "question": question}).encode() + b"\n"
        deadline_s = time.monotonic() + limits.wall_s
        try:
            reply = self._exchange(line, deadline_s)
        except OSError:  # the child has closed its end, or the time is over
            reply = b""
        if not reply.endswith(b"\n"):
            raise self._bury(limits)
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def close(self) -> None:
        """Kill the child; may be called from another thread during a question, which then fails."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
            child.wait()
        if self._socket is not None:
            self._socket.close()

    def _exchange(self, line: bytes, deadline_s: float) -> bytes:
        if self._socket is None:
            return b""
        self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
        self._socket.sendall(line)
        reply = bytearray()
        while not reply.endswith(b"\n"):
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            data = self._socket.recv(_READ_BYTES)
            if not data:
                break
            reply += data
        return bytes(reply)

    def _bury(self, limits: ProcessLimits) -> ChildDied:
        """End the child; the error says which limit it exceeded."""
        child = self._child
        self._child = None
        if self._socket is not None:
            self._socket.close()
        if child is None:
            return ChildDied("it was not started", killed=True)
        try:
            status = child.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return ChildDied(f"it takes more than {limits.wall_s:g} s", killed=False)
        if status == -signal.SIGXCPU:
            return ChildDied(f"it takes more than {limits.cpu_s} s of processor time", killed=False)
        if status == -signal.SIGSEGV:
            return ChildDied("it is nested too deeply", killed=False)
        if status == -signal.SIGABRT:
            return ChildDied(f"it takes more than {format_bytes(limits.memory_bytes)} of memory", killed=False)
        return ChildDied(f"the process ended with status {status}", killed=True)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: answer what comes on stdin until it ends. `answer` lets a MemoryError pass."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        for line in sys.stdin.buffer:
            asked = json.loads(line)
            _limit(ProcessLimits(**asked["limits"]))
            replies.write(json.dumps(answer(asked["question"])).encode() + b"\n")
            replies.flush()
    except MemoryError:
        os.abort()
    except OSError:
        pass  # the parent has gone


def _limit(limits: ProcessLimits) -> None:
    """Limit the next question; memory and time that this process has used before do not count."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes)
    _set_soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + limits.cpu_s)


def _set_soft(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
